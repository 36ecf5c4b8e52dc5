#pragma once

#include "cuda/common/fp64_fallback.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/row_order.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/tile_copy.cuh"
#include "cuda/sm80/tile.cuh"

// What follows the softmax of the forward kernels.
namespace flash_dmattn::cuda::sm80 {

// out += weights V.
template <class T, int M16, int N8, int D8, class Values>
__device__ inline void add_values(const float (&weights)[M16][N8][4], const Values& values,
                                  float (&out)[M16][D8][4]) {
  std::uint32_t packed[M16][N8 / 2][4];
  pack_operand<T>(weights, packed);
  multiply<T, N8 * 8>(out, packed, values);
}

// Stores the output and lse of a warp's rows; `tile` has the first of their heads. The tile of q is
// overwritten: the block has waited for all copies to it.
template <class QueryRows, int WarpRows, int D, bool HasDense, class Order = RowOrder<1>, class T>
__device__ inline void store_output(const ForwardParams& p, const QueryTile& tile, int row_end,
                                    int warp_row, std::uint32_t q_tile, float factor,
                                    const OnlineSoftmax<T, WarpRows / 16>& softmax,
                                    const Accumulator<WarpRows, D>& out) {
  constexpr int m16 = WarpRows / 16;
  const int lane = lane_id();
  float inverse[m16][2];
#pragma unroll
  for (int m = 0; m < m16; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) inverse[m][h] = softmax.sum[m][h] > 0 ? 1 / softmax.sum[m][h] : 0;
  }
  // A warp's rows of q are its own: they can be overwritten without a barrier.
  __syncwarp();
  copy_r2s<QueryRows>(out, q_tile, warp_row, 0, [&](float x, float y, int m, int h) {
    return pack_output<T>(x * inverse[m][h], y * inverse[m][h], p.saturate);
  });
  __syncwarp();
  std::byte* const to = p.out.data + tile.batch * p.out.batch + tile.head * p.out.head;
  copy_s2g<QueryRows>(ThreadGroup<warp_size>::of_warp(), q_tile, warp_row, warp_row + WarpRows,
                      p.out.aligned, p.shape.head_dim, [&](int r) {
                        const int row = tile.row + Order::query(r);
                        return row < row_end ? to + Order::head(r) * p.out.head + row * p.out.row
                                             : nullptr;
                      });

#pragma unroll
  for (int m = 0; m < m16; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = 0;
#pragma unroll
      for (int d = 0; d < D / 8; ++d) {
        largest =
            max_or_nan(largest, max_or_nan(fabsf(out[m][d][2 * h]), fabsf(out[m][d][2 * h + 1])));
      }
      largest = quad_reduce(largest, [](float a, float b) { return max_or_nan(a, b); });
      const float sum = softmax.sum[m][h];
      const bool ordinary = sum > 0 && isfinite(sum) && isfinite(largest) &&
                            fabsf(softmax.max[m][h] * factor) < 1e38f;
      const int block_row = warp_row + 16 * m + 8 * h;  // of the tile, and of 8 lanes in fours
      const int head = tile.head + Order::head(block_row);
      const int row = tile.row + Order::query(block_row) + lane / 4;
      const std::int64_t lse_row =
          (static_cast<std::int64_t>(tile.batch) * p.shape.heads_q + head) * p.shape.seqlen_q;
      if (ordinary && lane % 4 == 0 && row < row_end) {
        const double lse = softmax.log_sum_exp(m, h, factor);
        p.lse[lse_row + row] = static_cast<float>(lse);
        if (p.lse_low != nullptr) {
          p.lse_low[lse_row + row] =
              static_cast<float>(lse - static_cast<double>(static_cast<float>(lse)));
        }
      }
      __syncwarp();  // copy_s2g is done in all lanes
      unsigned rest = warp_ballot(!ordinary && row < row_end) & 0x11111111u;
      for (; rest != 0; rest &= rest - 1) {
        const int source = __ffs(static_cast<int>(rest)) - 1;
        fp64_row<T, HasDense>(p, {tile.batch, head, tile.kv_head},
                              tile.row + Order::query(block_row) + source / 4);
      }
    }
  }
}

}  // namespace flash_dmattn::cuda::sm80
