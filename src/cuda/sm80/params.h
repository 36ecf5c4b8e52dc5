#pragma once

#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/primitives/integers.h"

// Parameters of this family's backward kernels, and the layout of their fp32 sums.
namespace flash_dmattn::cuda::sm80 {

// The parameters of the query-major kernel, which adds dk and dv in memory.
struct QueryMajorParams : BackwardParams {
  QueryMajorParams() = default;
  explicit QueryMajorParams(const BackwardParams& common) : BackwardParams(common) {}

  KeyRanges key_ranges;   // used without tile lists
  OrderSemaphores order;  // order of the additions
  float* dk_accum =
      nullptr;  // [B, Hkv, Sk, accum_columns] fp32, columns in accumulator order; null: not wanted
  float* dv_accum = nullptr;  // the same
};

// The parameters of the key-major kernel, which adds dq in memory.
struct KeyMajorParams : BackwardParams {
  KeyMajorParams() = default;
  explicit KeyMajorParams(const BackwardParams& common) : BackwardParams(common) {}

  OrderSemaphores order;      // order of the additions
  float* dq_accum = nullptr;  // [B, Hq, Sq / rows rounded up] DqAccumLayout; null: not wanted
};

// The layout of dq_accum in the key-major backward: tiles of `rows` queries in accumulator order, so that a warp adds
// 512 consecutive bytes at once. Each of 2 x 4 warps has a part of 16 x 8 blocks, and in a block a lane has four
// floats, columns c and c + 1 of rows r and r + 8.
template <int D>
struct DqAccumLayout {
  static constexpr int rows = 64;
  static constexpr int row_warps = 2;
  static constexpr int warp_rows = rows / row_warps;
  static constexpr int warp_columns = D / 4;
  static constexpr int row_blocks = warp_rows / 16;
  static constexpr int column_blocks = warp_columns / 8;
  static constexpr int columns = D;
  static constexpr int floats = rows * D;

  static constexpr std::int64_t count(const Shape& shape) {
    return std::int64_t{shape.batch} * shape.heads_q * ceil_div(shape.seqlen_q, rows);
  }
  // The offset at which the four floats of a lane begin.
  static constexpr int offset(int warp, int row_block, int column_block, int lane) {
    return (((warp * row_blocks + row_block) * column_blocks + column_block) * 32 + lane) * 4;
  }
  // The offset of eight columns of a row and of the row 8 below it.
  static constexpr int offset(int row, int chunk) {
    const int warp = row / warp_rows + chunk / column_blocks * row_warps;
    return offset(warp, row % warp_rows / 16, chunk % column_blocks, row % 8 * 4);
  }
};

// The columns of a row of dk_accum: head_dim rounded up to 16, the columns of two accumulator blocks.
constexpr int accum_columns(int head_dim) { return (head_dim + 15) / 16 * 16; }

}  // namespace flash_dmattn::cuda::sm80
