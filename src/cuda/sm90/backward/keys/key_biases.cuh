#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/math.cuh"
#include "cuda/primitives/warp.cuh"
#include "cuda/sm90/backward/params.h"

namespace flash_dmattn::cuda::sm90 {

// The biases of this thread's two keys, as KeyRecord has them, for a tile of Rows queries. A key that no query of the
// tile sees has -inf.
template <int Rows, bool Delays>
class KeyBiases {
 public:
  __device__ KeyBiases(float first, float second) : bias_{first, second} {}

  // The bias that all scores of a key have in the tile.
  __device__ float common(int h) const { return bias_[h]; }
  __device__ void add_delayed(float (&)[Rows / 2], float) const {}

 private:
  float bias_[2];
};

// Biases with a delay. In most tiles a bias counts for every query or for none. This is computed again from the records at
// each use, as there are no registers for it.
template <int Rows>
class KeyBiases<Rows, true> {
 public:
  __device__ KeyBiases(const BackwardKernelParams& p, int first_query, const KeyRecord& first,
                       const KeyRecord& second) {
    set(p, first_query, 0, first);
    set(p, first_query, 1, second);
  }

  __device__ float common(int h) const {
    return recent_[h] > 0 && bias_[h] > negative_infinity ? 0 : bias_[h];
  }

  // Adds biases, times `factor`, to the scores for which they count, if these are some but not all of a key.
  __device__ void add_delayed(float (&scores)[Rows / 2], float factor) const {
    if (!crosses()) return;
#pragma unroll
    for (int i = 0; i < Rows / 2; ++i) {
      const int h = i / 2 % 2;
      if (recent_[h] > 0 && counts(h, i / 4, i % 2)) scores[i] += bias_[h] * factor;
    }
  }

  // Replaces the sums of dS over all queries by those over the queries for which the biases count. `ds` is dS in 16 bits:
  // in fp32 it would have to be kept longer.
  template <class T>
  __device__ void keep_biased(const std::uint32_t (&ds)[Rows / 4], float (&sums)[2]) const {
    if (!crosses()) {
#pragma unroll
      for (int h = 0; h < 2; ++h) sums[h] = recent_[h] > 0 ? 0 : sums[h];
      return;
    }
    sums[0] = sums[1] = 0;
#pragma unroll
    for (int i = 0; i < Rows / 4; ++i) {
      const int h = i % 2;
      const float2 two = Element<T>::widen_packed2(ds[i]);
      if (counts(h, i / 2, 0)) sums[h] += two.x;
      if (counts(h, i / 2, 1)) sums[h] += two.y;
    }
  }

 private:
  __device__ void set(const BackwardKernelParams& p, int first_query, int h, const KeyRecord& key) {
    const bool here = (key.first < first_query + Rows) & (key.last > first_query);
    bias_[h] = here ? key.bias : negative_infinity;
    recent_[h] = delayed_bias_begin(p.backward.score, p.backward.shape, key.key) - first_query;
  }

  // Whether the delay of a key of some lane ends within the tile.
  __device__ bool crosses() const {
    const auto ends_here = [&](int h) { return recent_[h] > 0 && recent_[h] < Rows; };
    return warp_any(ends_here(0) || ends_here(1));
  }

  // Whether the bias of key h counts for the thread's query e (0 or 1) in block j of eight.
  __device__ bool counts(int h, int j, int e) const {
    return 8 * j + e >= recent_[h] - 2 * (lane_id() % 4);
  }

  float bias_[2];
  int recent_[2];  // the queries of the tile, from its first, for which the bias does not count
};

}  // namespace flash_dmattn::cuda::sm90
