#pragma once

#include "cuda/attention/scheduler.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/tile/tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// The gradient of a key bias in the key-major backward. It sums dS of the lane's keys, rows 16 m + 8 h + l / 4 of its
// operands [keys, queries], over all queries of a block.
template <class T, int M16>
class KeyBiasGradient {
 public:
  // Adds dS of a query tile by a product with ones.
  template <int K16>
  __device__ void add(const std::uint32_t (&ds)[M16][K16][4]) {
    const std::uint32_t ones = pack<T>(1, 1);
#pragma unroll
    for (int m = 0; m < M16; ++m) {
      // All columns are equal, so a lane keeps only its first.
      float c[4] = {sums_[m][0], 0, sums_[m][1], 0};
#pragma unroll
      for (int k = 0; k < K16; ++k) mma_m16n8k16<T>(c, ds[m][k], ones, ones);
      sums_[m][0] = c[0];
      sums_[m][1] = c[2];
    }
  }

  // Adds the sums to memory and clears them. key_of(m, h) returns the key of the lane's rows.
  template <class KeyOf>
  __device__ void store(const BackwardParams& p, const KeyTile& tile, int head,
                        const KeyOf& key_of) {
    float* const to =
        reinterpret_cast<float*>(p.dbias.data) + p.dbias.begin(tile.batch, head, tile.kv_head);
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = key_of(m, h);
        if (lane_id() % 4 == 0 && key < p.shape.seqlen_k && sums_[m][h] != 0)
          atomicAdd(to + key * p.dbias.key, sums_[m][h]);
        sums_[m][h] = 0;
      }
    }
  }

 private:
  float sums_[M16][2] = {};
};

}  // namespace flash_dmattn::cuda::sm80
