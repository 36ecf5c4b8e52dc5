#pragma once

#include "cuda/attention/recomputed_row.cuh"
#include "cuda/primitives/warp.cuh"
#include "cuda/sm90/forward/params.h"

namespace flash_dmattn::cuda::sm90 {

// Recomputes the rows that the main kernel has marked with an lse of NaN. These are rows whose scores or sums
// are out of fp32's range, and rows that may see no key.

// A warp recomputes the marked rows; each lane brings one row, valid if `has_row`.
template <class T>
__device__ inline void fix_marked_rows(const ForwardParams& p, bool has_row, int batch, int head,
                                       int row) {
  const QueryHead own{batch, head, head / p.shape.group_heads()};
  unsigned left = warp_ballot(has_row && isnan(p.lse[own.row_index(p.shape, row)]));
  for (; left != 0; left &= left - 1) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    recompute_row<T, true>(
        p, {shuffle(own.batch, lane), shuffle(own.head, lane), shuffle(own.kv_head, lane)},
        shuffle(row, lane));
  }
}

// Runs after kernels whose blocks have several work tiles, because a call in their persistent loop would spill
// registers, and after kernels that recompute no rows (fixes_rows).
template <class T>
struct FixForwardKernel {
  using Params = ForwardKernelParams;
  static constexpr int threads = 256;
  static constexpr int min_blocks = 1;
  struct SharedStorage {};

  __device__ void operator()(const Params& p, SharedStorage&) const {
    if (p.needs_fix != nullptr && *p.needs_fix == 0) return;
    const Shape& shape = p.forward.shape;
    const std::int64_t rows =
        static_cast<std::int64_t>(shape.batch) * shape.heads_q * shape.seqlen_q;
    const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * threads;
    for (std::int64_t i = first; i < rows; i += static_cast<std::int64_t>(gridDim.x) * threads) {
      const std::int64_t index = i + threadIdx.x;
      fix_marked_rows<T>(p.forward, index < rows,
                         static_cast<int>(index / shape.seqlen_q / shape.heads_q),
                         static_cast<int>(index / shape.seqlen_q % shape.heads_q),
                         static_cast<int>(index % shape.seqlen_q));
    }
  }
};

}  // namespace flash_dmattn::cuda::sm90
