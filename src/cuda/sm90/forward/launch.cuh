#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/device.h"
#include "cuda/primitives/launch.h"
#include "cuda/sm90/dense/rows.h"
#include "cuda/sm90/dispatch.h"
#include "cuda/sm90/forward/fix_rows.cuh"
#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/launch.h"
#include "cuda/sm90/forward/prepare.cuh"

namespace flash_dmattn::cuda::sm90 {

// Sets the parameters that depend on the kernel.
template <class Kernel>
void set_kernel_params(ForwardKernelParams& params) {
  using T = typename Kernel::Element;
  constexpr ForwardPolicy policy = Kernel::policy;
  constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>;
  const ForwardParams& p = params.forward;
  const Shape& shape = p.shape;
  if (Kernel::load != KeyLoad::any) {
    const int box_rows = params.two_heads ? 8 : policy.rows();
    const int box_heads = params.two_heads ? 2 : 1;
    params.q_map = make_tensor_map(p.q, shape.head_dim, shape.seqlen_q, shape.heads_q, shape.batch,
                                   box_rows, bf16, box_heads);
  }
  if (Kernel::load == KeyLoad::tma) {
    const auto map = [&](const InputRows& tensor, int dim) {
      return make_tensor_map(tensor, dim, shape.seqlen_k, shape.heads_kv, shape.batch, policy.keys,
                             bf16);
    };
    params.k_map = map(p.k, shape.head_dim);
    params.v_map = map(p.v, shape.value_dim);
  }
  if (Kernel::dense == DenseAccess::tiles) {
    const int queries = params.warpgroup_queries();
    if (p.score.bias.dense) params.bias_map = DenseRows(shape, p.score.bias).map(queries, bf16);
    if (params.reads_mask_bytes())
      params.mask_map = DenseRows(shape, p.score.mask, 1).map(queries, bf16);
  }
  params.bias_factor = Kernel::converts_scores(p) ? log2e : 1 / p.score.scale;
  params.work_tiles = Kernel::work_tiles(params);
}

template <class T, int D, int Dv, ForwardVariant Variant>
void launch_forward_kernel(ForwardKernelParams params, cudaStream_t stream) {
  using Kernel = ForwardKernel<T, D, Dv, Variant>;
  set_kernel_params<Kernel>(params);
  const ForwardParams& p = params.forward;
  const PrepareForward<T> prepare{{p.shape, p.score, params.info, Kernel::key_bias_factor(params)},
                                  params.next_work,
                                  params.needs_fix,
                                  params.has_large_rows};
  for_each(prepare.items(), prepare, stream);
  const int multiprocessors = current_device().multiprocessors;
  const int blocks = params.next_work == nullptr ? params.work_tiles
                                                 : std::min(multiprocessors, params.work_tiles);
  launch<Kernel>(blocks, params, stream);
  if constexpr (is_repeated(Kernel::repetition)) {
    if (params.has_large_rows != nullptr) {
      using Repeating = ForwardKernel<T, D, D, repeating_variant(D, Variant)>;
      static_assert(Repeating::policy.rows() == Kernel::policy.rows(),
                    "it has the same work tiles");
      set_kernel_params<Repeating>(params);
      launch<Repeating>(blocks, params, stream);
    }
  }
  const bool has_fixed_rows = Kernel::fixes_rows && params.needs_fix == nullptr;
  if (!has_fixed_rows) launch<FixForwardKernel<T>>(2 * multiprocessors, params, stream);
}

template <class T, int D>
void launch_forward(const ForwardChoice& choice, const ForwardParams& p,
                    const ForwardWorkspace& workspace, cudaStream_t stream) {
  const std::int64_t rows = std::int64_t{p.shape.batch} * p.shape.heads_q * p.shape.seqlen_q;
  if (rows == 0) return;
  ForwardKernelParams params{};
  params.forward = p;
  params.info = workspace.info;
  params.next_work = workspace.next_work;
  params.needs_fix = workspace.needs_fix;
  params.has_large_rows = workspace.has_large_rows;
  if (p.shape.seqlen_k == 0) {
    // Marks every row.
    constexpr int nan_bytes = 0xff;
    check(cudaMemsetAsync(p.lse, nan_bytes, rows * sizeof(float), stream), "cudaMemsetAsync");
    params.needs_fix = nullptr;
    launch<FixForwardKernel<T>>(2 * current_device().multiprocessors, params, stream);
    return;
  }
  params.two_heads = choice.variant.dense == DenseAccess::tiles && has_two_heads(p);
  dispatch<T, D, forward_variants>(choice, [&]<ForwardVariant Variant>() {
    if constexpr (has_kernel(D, Variant)) {
      constexpr int smallest = smallest_value_dim(D, Variant);
      if (choice.value_dim == smallest)
        return launch_forward_kernel<T, D, smallest, Variant>(params, stream);
      if constexpr (smallest != D) launch_forward_kernel<T, D, D, Variant>(params, stream);
    }
  });
}

}  // namespace flash_dmattn::cuda::sm90
