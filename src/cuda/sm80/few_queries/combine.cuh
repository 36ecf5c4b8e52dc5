#pragma once

#include "cuda/common/fp64_fallback.cuh"
#include "cuda/sm80/few_queries/rows.cuh"
#include "cuda/sm80/forward_epilogue.cuh"

namespace flash_dmattn::cuda::sm80::few_queries {

// Adds the sums that the blocks of SplitForwardKernel leave, in the order of the splits, and stores the output and
// lse. A block has a row, a warp every warps-th split of it; the loads of `batch` splits are on their way at once.
// Rows that fp32 does not hold are computed again, in double.
template <class T, int D>
struct CombineKernel {
  using Params = few_queries::Params;
  static constexpr int warps = 8;
  static constexpr int threads = warps * warp_size;
  static constexpr int min_blocks = 2;
  static constexpr int batch = 4;
  static constexpr int lane_columns = D / warp_size;

  // A lane's columns of an output, lane_columns * lane and the next.
  struct alignas(lane_columns < 4 ? 8 : 16) Columns {
    float x[lane_columns] = {};
  };

  // What a warp has added up.
  struct Total {
    RowSums sums{negative_infinity, 0};
    Columns out;

    // Adds a part, unless it has seen nothing.
    __device__ void add(RowSums part, const Columns& values) {
      if (sees_nothing(part)) return;
      const float larger = fmaxf(sums.max, part.max);
      const float scale = rescale(sums.max, larger);
      const float part_scale = rescale(part.max, larger);
      sums = {larger, fmaf(part.sum, part_scale, sums.sum * scale)};
#pragma unroll
      for (int i = 0; i < lane_columns; ++i)
        out.x[i] = fmaf(values.x[i], part_scale, out.x[i] * scale);
    }
  };

  struct SharedStorage {
    Columns out[warps][warp_size];
    RowSums sums[warps];
  };

  static long blocks(const Params& p) {
    return static_cast<long>(p.shape.batch) * p.shape.heads_q * p.shape.seqlen_q;
  }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const std::int64_t index = blockIdx.x;  // in [B, Hq, Sq]
    const int lane = lane_id();
    const Total mine = add_splits(p, index * p.split.splits);
    shared.out[warp_id()][lane] = mine.out;
    if (lane == 0) shared.sums[warp_id()] = mine.sums;
    __syncthreads();
    if (warp_id() > 0) return;

    Total row;
#pragma unroll
    for (int w = 0; w < warps; ++w) row.add(shared.sums[w], shared.out[w][lane]);
    store(p, index, row);
  }

 private:
  // The splits warp, warp + warps, ... of the row whose first part is `first`.
  static __device__ Total add_splits(const Params& p, std::int64_t first) {
    Total total;
    for (int begin = warp_id(); begin < p.split.splits; begin += batch * warps) {
      RowSums sums[batch];
      Columns out[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const int split = begin + i * warps;
        sums[i] = {negative_infinity, 0};
        if (split >= p.split.splits) continue;
        sums[i] = p.sums[first + split];
        const auto* const columns = reinterpret_cast<const Columns*>(p.outs + (first + split) * D);
        out[i] = columns[lane_id()];
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) total.add(sums[i], out[i]);
    }
    return total;
  }

  static __device__ void store(const Params& p, std::int64_t index, const Total& row) {
    const int head_q = static_cast<int>(index / p.shape.seqlen_q % p.shape.heads_q);
    const QueryHead head{static_cast<int>(index / p.shape.seqlen_q / p.shape.heads_q), head_q,
                         head_q / (p.shape.heads_q / p.shape.heads_kv)};
    const int query = static_cast<int>(index % p.shape.seqlen_q);
    float largest = 0;
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) largest = max_or_nan(largest, fabsf(row.out.x[i]));
    const RowSums sums = row.sums;
    const bool ordinary =
        sums.sum > 0 && isfinite(sums.sum) && isfinite(largest) && fabsf(sums.max) < 1e38f;
    if (!warp_all(ordinary)) {
      fp64_row<T, true>(p, head, query);
      return;
    }
    const float inverse = 1 / sums.sum;
    const int column = lane_id() * lane_columns;
    auto* const to =
        reinterpret_cast<std::uint16_t*>(row_of<T>(p.out, head.batch, query, head.head));
#pragma unroll
    for (int i = 0; i < lane_columns; i += 2) {
      if (column + i >= p.shape.head_dim) continue;
      const std::uint32_t two =
          pack_output<T>(row.out.x[i] * inverse, row.out.x[i + 1] * inverse, p.saturate);
      if (p.out.aligned) {
        *reinterpret_cast<std::uint32_t*>(to + column + i) = two;
      } else {
        to[column + i] = static_cast<std::uint16_t>(two);
        to[column + i + 1] = static_cast<std::uint16_t>(two >> 16);
      }
    }
    if (lane_id() == 0) store_lse(p, index, log_sum_exp<T>(sums.max, sums.sum));
  }
};

}  // namespace flash_dmattn::cuda::sm80::few_queries
