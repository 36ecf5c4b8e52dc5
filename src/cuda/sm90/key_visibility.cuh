#pragma once

#include "cuda/common/math.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/sm90/backward_params.h"

namespace flash_dmattn::cuda::sm90 {

// Which queries of a tile of Rows see this thread's two keys, rows of a warpgroup's scores. Where none does, the
// scores begin with -inf; only where some do are elements tested, of the warps that have such a key: a key comes once
// and leaves once.
template <int Rows>
class KeyVisibility {
 public:
  // Before the scores of a tile begin. `h`: which of the two keys. Without branches between lanes.
  __device__ void see(int h, KeyRecord key, int first_query) {
    const int end_query = first_query + Rows;
    gone_[h] = key.last <= first_query;
    const bool here = !gone_[h] & (key.first < end_query);
    bias_[h] = here ? key.bias : negative_infinity;
    partial_[h] = warp_any(here & ((key.first > first_query) | (key.last < end_query)));
  }

  // Every query that sees the key comes before the tile.
  __device__ bool is_gone(int h) const { return gone_[h]; }
  // The initial value of the scores of the key's row, without the query's part, in units of the accumulator.
  __device__ float bias(int h) const { return bias_[h]; }
  // Whether elements of key h of some lane need a test.
  __device__ bool is_partial(int h) const { return partial_[h]; }

  // Scores that a query does not have become -inf.
  template <int H>
  static __device__ void mask(const KeyRecord& key, int first_query, float (&scores)[Rows / 2]) {
    const int column = first_query + 2 * (lane_id() % 4);
    const int first = key.first - column;
    const int last = key.last - column;
#pragma unroll
    for (int j = 0; j < Rows / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int query = 8 * j + e;
        if (query < first || query >= last) scores[4 * j + 2 * H + e] = negative_infinity;
      }
    }
  }

 private:
  bool gone_[2] = {};
  bool partial_[2] = {};
  float bias_[2] = {};
};

}  // namespace flash_dmattn::cuda::sm90
