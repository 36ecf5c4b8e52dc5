#pragma once

#include "cuda/common/fp64_fallback.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/sm90/forward_params.h"

namespace flash_dmattn::cuda::sm90 {

// Recomputes in double the rows that the main kernel has marked with an lse of NaN: rows whose scores or sums are out
// of fp32's range and rows that may see no key. A kernel of its own: a function call in the persistent loop would
// serialize its products (C7510).
template <class T>
struct FixForwardKernel {
  using Params = ForwardKernelParams;
  static constexpr int warps = 8;
  static constexpr int threads = warps * 32;
  static constexpr int min_blocks = 1;
  struct SharedStorage {};

  __device__ void operator()(const Params& p, SharedStorage&) const {
    if (p.needs_fix != nullptr && *p.needs_fix == 0) return;
    const Shape& shape = p.forward.shape;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const std::int64_t rows =
        static_cast<std::int64_t>(shape.batch) * shape.heads_q * shape.seqlen_q;
    const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
    for (std::int64_t first = warp * 32; first < rows;
         first += static_cast<std::int64_t>(gridDim.x) * warps * 32) {
      const bool marked = first + lane < rows && isnan(p.forward.lse[first + lane]);
      unsigned left = warp_ballot(marked);
      for (; left != 0; left &= left - 1) {
        const std::int64_t index = first + __ffs(static_cast<int>(left)) - 1;
        const int row = static_cast<int>(index % shape.seqlen_q);
        const int head = static_cast<int>(index / shape.seqlen_q % shape.heads_q);
        const int batch = static_cast<int>(index / shape.seqlen_q / shape.heads_q);
        fp64_row<T, true>(p.forward, {batch, head, head / (shape.heads_q / shape.heads_kv)}, row);
      }
    }
  }
};

}  // namespace flash_dmattn::cuda::sm90
