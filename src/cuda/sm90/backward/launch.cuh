#pragma once

#include <type_traits>

#include "cuda/primitives/launch.h"
#include "cuda/sm90/backward/kernel.cuh"
#include "cuda/sm90/backward/launch.h"
#include "cuda/sm90/backward/stages/find_visits.cuh"
#include "cuda/sm90/dense/rows.h"
#include "cuda/sm90/dispatch.h"
#include "cuda/sm90/slots/rows.cuh"
#include "cuda/stages/postprocess.cuh"

namespace flash_dmattn::cuda::sm90 {

template <class T, int D, int Dv, BackwardVariant Variant>
void launch_backward_kernel(BackwardKernelParams params, cudaStream_t stream) {
  using Kernel = BackwardKernel<T, D, Dv, Variant>;
  constexpr int rows = Kernel::policy.rows;
  static_assert(sizeof(typename Kernel::SharedStorage) <= 227 * 1024);
  const BackwardParams& p = params.backward;
  const Shape& shape = p.shape;
  const auto map = [&](const InputRows& tensor, int dim, int seqlen, int heads, int box_rows) {
    return make_tensor_map(tensor, dim, seqlen, heads, shape.batch, box_rows,
                           std::is_same_v<T, __nv_bfloat16>);
  };
  params.q_map = map(p.q, shape.head_dim, shape.seqlen_q, shape.heads_q, rows);
  params.dout_map = map(p.dout, shape.value_dim, shape.seqlen_q, shape.heads_q, rows);
  params.k_map = map(p.k, shape.head_dim, shape.seqlen_k, shape.heads_kv, Kernel::policy.keys);
  params.v_map = map(p.v, shape.value_dim, shape.seqlen_k, shape.heads_kv, Kernel::policy.keys);
  constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>;
  if (Variant.dense == DenseAccess::tiles && p.score.bias.dense)
    params.bias_map = DenseRows(shape, p.score.bias).map(rows, bf16);
  if (Variant.has_dense() && params.dense_dbias.by_tma)
    params.dbias_map = DenseRows(shape, p.dbias).map(rows, bf16);

  if constexpr (Variant.has_dense()) launch<FindVisits>(FindVisits::blocks(params), params, stream);
  if constexpr (Variant.has_slots()) {
    using Prepare = PrepareSlots<T>;
    const typename Prepare::Params prepare{p, params.info, params.slots};
    launch<Prepare>(Prepare::blocks(prepare), prepare, stream);
  }
  const LaunchOptions options{
      .cluster = Kernel::policy.cluster,
      .cooperative = Variant.has_slots() && params.order.published != nullptr};
  launch<Kernel>(Kernel::blocks(params), params, stream, options);
  launch<BackwardKernel<T, D, Dv, with_large_lse(Variant)>>(Kernel::blocks(params), params, stream,
                                                            options);
  if constexpr (Variant.has_slots()) {
    using Add = AddSlotParts<T, D, Dv>;
    launch<Add>(Add::blocks(params), params, stream);
  }
  if (params.dq_accum == nullptr) return;
  const BwdPostprocessDq<T, typename Kernel::DqLayout> store{
      shape, params.dq_accum, p.dq, params.dq_scale, p.saturate, p.flags};
  for_each(store.items(), store, stream);
}

template <class T, int D>
void launch_backward(const BackwardChoice& choice, const BackwardKernelParams& params,
                     cudaStream_t stream) {
  dispatch<T, D, backward_variants>(choice, [&]<BackwardVariant Variant>() {
    if constexpr (has_kernel(D, Variant)) {
      constexpr int smallest = smallest_value_dim(D, Variant);
      if (choice.value_dim == smallest)
        return launch_backward_kernel<T, D, smallest, Variant>(params, stream);
      if constexpr (smallest != D) launch_backward_kernel<T, D, D, Variant>(params, stream);
    }
  });
}

}  // namespace flash_dmattn::cuda::sm90
