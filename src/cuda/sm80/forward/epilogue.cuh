#pragma once

#include "cuda/attention/recomputed_row.cuh"
#include "cuda/attention/scheduler.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/primitives/tile_copy.cuh"
#include "cuda/sm80/tile/fragment.cuh"
#include "cuda/sm80/tile/row_order.cuh"
#include "cuda/sm80/tile/tile.cuh"

// The product P V and the epilogue of the forward kernels.
namespace flash_dmattn::cuda::sm80 {

// out += weights V.
template <class T, int M16, int N8, int D8, class Values>
__device__ inline void add_values(const float (&weights)[M16][N8][4], const Values& values,
                                  float (&out)[M16][D8][4]) {
  std::uint32_t packed[M16][N8 / 2][4];
  pack_operand<T>(weights, packed);
  multiply<T, N8 * 8>(out, packed, values);
}

// The largest magnitude in row (m, h) of a lane; NaN if there is one.
template <int M16, int D8>
__device__ inline float largest_in_row(const float (&out)[M16][D8][4], int m, int h) {
  float largest = 0;
#pragma unroll
  for (int d = 0; d < D8; ++d) {
    largest = max_or_nan(largest, max_or_nan(fabsf(out[m][d][2 * h]), fabsf(out[m][d][2 * h + 1])));
  }
  return quad_reduce(largest, [](float a, float b) { return max_or_nan(a, b); });
}

__device__ inline void store_lse(const ForwardParams& p, std::int64_t index, double lse) {
  const auto rounded = static_cast<float>(lse);
  p.lse[index] = rounded;
  if (p.lse_low != nullptr)
    p.lse_low[index] = static_cast<float>(lse - static_cast<double>(rounded));
}

// Divides a warp's output by the sums and stores it through the warp's rows of q in shared memory.
template <class QueryRows, int WarpRows, int D, class Order, class T>
__device__ inline void store_normalized(const ForwardParams& p, const QueryTile& tile, int row_end,
                                        int warp_row, std::uint32_t q_tile,
                                        const OnlineSoftmax<T, WarpRows / 16>& softmax,
                                        const Accumulator<WarpRows, D>& out) {
  constexpr int m16 = WarpRows / 16;
  float inverse[m16][2];
#pragma unroll
  for (int m = 0; m < m16; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) inverse[m][h] = softmax.sum[m][h] > 0 ? 1 / softmax.sum[m][h] : 0;
  }
  // No other warp reads a warp's rows of q, so they can be overwritten without a barrier.
  __syncwarp();
  copy_r2s<QueryRows>(out, q_tile, warp_row, 0, [&](float x, float y, int m, int h) {
    return pack_output<T>(x * inverse[m][h], y * inverse[m][h], p.saturate);
  });
  __syncwarp();
  std::byte* const to = p.out.data + tile.batch * p.out.batch + tile.head * p.out.head;
  const auto destination = [&](int r) {
    const int row = tile.row + Order::query(r);
    return row < row_end ? to + Order::head(r) * p.out.head + row * p.out.row : nullptr;
  };
  copy_s2g<QueryRows>(ThreadGroup<warp_size>::of_warp(), q_tile, warp_row, warp_row + WarpRows,
                      p.out.aligned, p.shape.value_dim, destination);
}

// Stores the output and lse of a warp's rows; `tile` has the first of their heads. Rows that overflow fp32 are
// recomputed. It overwrites the tile of q, as the block has waited for all copies to it.
template <class QueryRows, int WarpRows, int D, bool HasDense, class Order = RowOrder<1>, class T>
__device__ inline void store_output(const ForwardParams& p, const QueryTile& tile, int row_end,
                                    int warp_row, std::uint32_t q_tile, float factor,
                                    const OnlineSoftmax<T, WarpRows / 16>& softmax,
                                    const Accumulator<WarpRows, D>& out) {
  store_normalized<QueryRows, WarpRows, D, Order>(p, tile, row_end, warp_row, q_tile, softmax, out);
  const int lane = lane_id();
#pragma unroll
  for (int m = 0; m < WarpRows / 16; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = softmax.sum[m][h];
      const float largest = largest_in_row(out, m, h);
      const bool ordinary = sum > 0 && isfinite(sum) && isfinite(largest) &&
                            fabsf(softmax.max[m][h] * factor) < 1e38f &&
                            fabsf(softmax.reference[m][h]) < 1e38f;
      const int block_row =
          warp_row + 16 * m + 8 * h;  // first of 8 rows of the tile, with four lanes each
      const QueryHead head{tile.batch, tile.head + Order::head(block_row), tile.kv_head};
      const int first_row = tile.row + Order::query(block_row);
      const int row = first_row + lane / 4;
      if (ordinary && lane % 4 == 0 && row < row_end) {
        store_lse(p, head.row_index(p.shape, row), softmax.log_sum_exp(m, h, factor));
      }
      __syncwarp();  // all lanes have stored their part of the output
      constexpr unsigned one_lane_per_row = 0x11111111u;
      unsigned rest = warp_ballot(!ordinary && row < row_end) & one_lane_per_row;
      for (; rest != 0; rest &= rest - 1) {
        const int source = __ffs(static_cast<int>(rest)) - 1;
        recompute_row<T, HasDense>(p, head, first_row + source / 4);
      }
    }
  }
}

}  // namespace flash_dmattn::cuda::sm80
