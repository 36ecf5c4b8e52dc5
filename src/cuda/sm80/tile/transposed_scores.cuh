#pragma once

#include "cuda/primitives/warp.cuh"
#include "cuda/sm80/tile/key_info.cuh"

// Applies visibility and biases of a block's own keys to transposed score tiles, [keys, queries].
namespace flash_dmattn::cuda {

// The queries that see keys of a block: some keys for `touched`, all keys for `full`.
struct QueryBounds {
  int touched_begin = 0x7fffffff;
  int touched_end = 0;
  int full_begin = 0;
  int full_end = 0x7fffffff;

  // Called by all lanes of a warp.
  template <int Keys>
  __device__ explicit QueryBounds(const KeyInfoTile<Keys>& key_info) {
#pragma unroll
    for (int i = 0; i < Keys / 32; ++i) {
      const QueryRange range = key_info.range[lane_id() + 32 * i];
      const bool seen = range.length > 0;
      const int end = range.first + range.length;
      touched_begin = min(touched_begin, seen ? range.first : 0x7fffffff);
      touched_end = max(touched_end, seen ? end : 0);
      full_begin = max(full_begin, range.first);
      full_end = min(full_end, seen ? end : 0);
    }
    touched_begin = warp_min(touched_begin);
    touched_end = warp_max(touched_end);
    full_begin = warp_max(full_begin);
    full_end = warp_min(full_end);
  }

  __device__ bool all_seen() const { return full_end > 0; }
};

// Keys are rows here; fragment.cuh has the same functions with keys as columns.

// x = factor x + log2 e times the bias of the key, for a warp whose rows begin at `begin`.
template <int Keys, int M16, int N8>
__device__ inline void add_row_bias(float factor, const KeyInfoTile<Keys>& key_info, int begin,
                                    int lane, float (&x)[M16][N8][4]) {
#pragma unroll
  for (int m = 0; m < M16; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float bias = key_info.bias[begin + 16 * m + 8 * h + lane / 4] * log2e;
#pragma unroll
      for (int n = 0; n < N8; ++n) {
        x[m][n][2 * h] = fmaf(x[m][n][2 * h], factor, bias);
        x[m][n][2 * h + 1] = fmaf(x[m][n][2 * h + 1], factor, bias);
      }
    }
  }
}

// Sets x to -inf where the query does not see the key. `first_query` is the first query of the tile.
template <int Keys, int M16, int N8>
__device__ inline void mask_rows(const KeyInfoTile<Keys>& key_info, int begin, int lane,
                                 int first_query, float (&x)[M16][N8][4]) {
#pragma unroll
  for (int m = 0; m < M16; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const QueryRange range = key_info.range[begin + 16 * m + 8 * h + lane / 4];
#pragma unroll
      for (int n = 0; n < N8; ++n) {
        const int query = first_query + 8 * n + 2 * (lane % 4);
        if (!range.sees(query)) x[m][n][2 * h] = negative_infinity;
        if (!range.sees(query + 1)) x[m][n][2 * h + 1] = negative_infinity;
      }
    }
  }
}

}  // namespace flash_dmattn::cuda
