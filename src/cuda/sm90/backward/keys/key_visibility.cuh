#pragma once

#include "cuda/primitives/math.cuh"
#include "cuda/primitives/warp.cuh"
#include "cuda/sm90/backward/params.h"

namespace flash_dmattn::cuda::sm90 {

// The queries of a tile of Rows that see this thread's two keys, which are rows of a warpgroup's scores. If no query
// sees a key, its scores are initialized with -inf. Elements are tested only in warps with a key that some but not all
// queries see, at the first and the last tile of the key's range.
template <int Rows>
class KeyVisibility {
 public:
  // Sets the visibility of key `h` for the tile that begins at `first_query`, without branches between lanes.
  __device__ void see(int h, KeyRecord key, int first_query) {
    const int end_query = first_query + Rows;
    gone_[h] = key.last <= first_query;
    const bool here = !gone_[h] & (key.first < end_query);
    bias_[h] = here ? key.bias : negative_infinity;
    partial_[h] = warp_any(here & ((key.first > first_query) | (key.last < end_query)));
  }

  // Whether every query that sees the key is before the tile.
  __device__ bool is_gone(int h) const { return gone_[h]; }
  // The initial value of the scores of the key's row, without the query's term, in units of the accumulator.
  __device__ float bias(int h) const { return bias_[h]; }
  // Whether elements of key h of some lane need a test.
  __device__ bool is_partial(int h) const { return partial_[h]; }

  // Finds the visible scores of a key while the scores are computed.
  __device__ void prepare_mask(int h, const KeyRecord& key, int first_query) {
    const int column = first_query + 2 * (lane_id() % 4);
    const unsigned visible =
        bit_range(scores_before(key.first - column), scores_before(key.last - column));
    unsigned& word = visible_[h * row_scores / 32];
    word = h * row_scores % 32 == 0 ? visible : (word & low_half) | visible << row_scores % 32;
  }

  // Sets scores of keys that a query does not see to -inf.
  template <int H>
  __device__ void mask(float (&scores)[Rows / 2]) const {
#pragma unroll
    for (int i = 0; i < row_scores; ++i) {
      constexpr int first = H * row_scores;
      const bool visible = (visible_[first / 32] >> (first % 32 + i) & 1) != 0;
      if (!visible) scores[4 * (i / 2) + 2 * H + i % 2] = negative_infinity;
    }
  }

 private:
  static constexpr int row_scores = Rows / 4;  // scores of a thread in a row
  static constexpr unsigned low_half = 0xffff;

  // The number of a thread's scores of a row, two of each eight, that are before `query`, which is relative to the
  // first.
  static __device__ int scores_before(int query) {
    const int within = min(max(query, 0), Rows);
    return within / 8 * 2 + min(within % 8, 2);
  }

  bool gone_[2] = {};
  bool partial_[2] = {};
  float bias_[2] = {};
  unsigned visible_[2 * row_scores / 32] = {};  // a bit for each score of partial keys
};

}  // namespace flash_dmattn::cuda::sm90
