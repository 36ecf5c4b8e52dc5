#pragma once

#include "cuda/primitives/warp.cuh"
#include "cuda/sm80/tile/tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// A warp's part of an M x N tile that is divided among a grid of `Warps` warps with `Rows` rows.
template <int Warps, int M, int N, int Rows>
struct WarpTile {
  static constexpr int m = M / Rows;
  static constexpr int n = N / (Warps / Rows);
  static constexpr int grid_rows = Rows;
  static constexpr int grid_columns = Warps / Rows;
  using Accumulators = Accumulator<m, n>;

  static __device__ int grid_row() { return warp_id() % Rows; }
  static __device__ int grid_column() { return warp_id() / Rows; }
  static __device__ int row() { return grid_row() * m; }
  static __device__ int column() { return grid_column() * n; }
};

}  // namespace flash_dmattn::cuda::sm80
