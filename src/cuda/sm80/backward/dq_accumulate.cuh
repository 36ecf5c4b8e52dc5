#pragma once

#include "cuda/primitives/warp.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/tile/tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// Adds dS^T K to dq_tile in memory, for a query tile and the keys of a block of 8 warps. `ds` and `k` are shared tiles
// [keys, queries] and [keys, D].
template <class T, int D, class Scores, class KeyRows, int Ahead>
__device__ inline void accumulate_dq(float* dq_tile, std::uint32_t ds, std::uint32_t k,
                                     int head_dim) {
  using Layout = DqAccumLayout<D>;
  // The test of each column block costs 4 % at D 64. Without it, padded columns add zeros.
  constexpr bool skips_padding = D > 64;
  Accumulator<Layout::warp_rows, Layout::warp_columns> dq;
  clear(dq);
  const int warp = warp_id();
  const int column = warp / Layout::row_warps * Layout::warp_columns;
  multiply<T, KeyRows::rows, Ahead>(
      dq, OperandA<Scores, Major::mn>(ds, warp % Layout::row_warps * Layout::warp_rows),
      OperandB<KeyRows, Major::mn>(k, column));
  float* const to = dq_tile + Layout::offset(warp, 0, 0, lane_id());
#pragma unroll
  for (int m = 0; m < Layout::row_blocks; ++m) {
#pragma unroll
    for (int n = 0; n < Layout::column_blocks; ++n) {
      if (skips_padding && column + 8 * n >= head_dim) continue;
      reduce_add(to + Layout::offset(0, m, n, 0), dq[m][n][0], dq[m][n][1], dq[m][n][2],
                 dq[m][n][3]);
    }
  }
}

}  // namespace flash_dmattn::cuda::sm80
