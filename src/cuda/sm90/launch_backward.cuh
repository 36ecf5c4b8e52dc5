#pragma once

#include <type_traits>

#include "cuda/common/launch.h"
#include "cuda/common/postprocess.cuh"
#include "cuda/sm90/backward.cuh"
#include "cuda/sm90/backward_launch.h"
#include "cuda/sm90/cooperative_launch.cuh"
#include "cuda/sm90/kernel_choice.h"
#include "cuda/sm90/prepare_backward.cuh"
#include "cuda/sm90/prepare_key_info.cuh"
#include "cuda/sm90/slot_rows.cuh"
#include "cuda/sm90/tensor_map.h"

namespace flash_dmattn::cuda::sm90 {

template <class T, int D, KeyPlacement Placement, bool Overlaps>
void launch_backward_kernel(BackwardKernelParams params, cudaStream_t stream) {
  using Kernel = BackwardKernel<T, D, Placement, Overlaps>;
  constexpr int rows = Kernel::policy.rows;
  const BackwardParams& p = params.backward;
  const Shape& shape = p.shape;
  const auto map = [&](const InputRows& tensor, int seqlen, int heads, int box_rows) {
    return make_tensor_map(tensor, shape.head_dim, seqlen, heads, shape.batch, box_rows,
                           std::is_same_v<T, __nv_bfloat16>);
  };
  params.q_map = map(p.q, shape.seqlen_q, shape.heads_q, rows);
  params.dout_map = map(p.dout, shape.seqlen_q, shape.heads_q, rows);
  params.k_map = map(p.k, shape.seqlen_k, shape.heads_kv, BackwardPolicy::keys);
  params.v_map = map(p.v, shape.seqlen_k, shape.heads_kv, BackwardPolicy::keys);

  const PrepareRowStats<rows> stats{shape, p.lse_log2, p.delta, p.score.factor, params.row_stats};
  for_each(stats.items(), stats, stream);
  if constexpr (Placement != KeyPlacement::block) {
    const PrepareKeyInfo<T> key_info{shape, p.score, params.info, 1 / p.score.scale};
    for_each(key_info.items(), key_info, stream);
  }
  if constexpr (Placement == KeyPlacement::slots) {
    const PrepareSlotRecords records{shape, params.info, params.slots};
    for_each(records.items(), records, stream);
    const ClearUnseenKeys clear{shape, params.info, p.dk, p.dv};
    for_each(clear.items(), clear, stream);
  }
  if (Placement == KeyPlacement::slots && params.order.published != nullptr) {
    launch_cooperative<Kernel>(Kernel::blocks(params), params, stream);
  } else {
    launch<Kernel>(Kernel::blocks(params), params, stream);
  }
  if constexpr (Placement == KeyPlacement::slots) {
    using Add = AddSlotParts<T, D>;
    launch<Add>(Add::blocks(params), params, stream);
  }
  if (params.dq_accum == nullptr) return;
  const BwdPostprocessDq<T, typename Kernel::DqLayout> store{
      shape, params.dq_accum, p.dq, p.score.scale, p.saturate, p.flags};
  for_each(store.items(), store, stream);
}

template <class T, int D>
void launch_backward(const BackwardChoice& choice, const BackwardKernelParams& params,
                     cudaStream_t stream) {
  const auto launch_placed = [&]<bool Overlaps>() {
    using enum KeyPlacement;
    switch (choice.placement) {
      case block: return launch_backward_kernel<T, D, block, Overlaps>(params, stream);
      case block_key_info:
        return launch_backward_kernel<T, D, block_key_info, Overlaps>(params, stream);
      case slots: return launch_backward_kernel<T, D, slots, Overlaps>(params, stream);
    }
  };
  if constexpr (has_no_overlap(Element<T>::dtype, D)) {
    if (!choice.overlaps) return launch_placed.template operator()<false>();
  }
  launch_placed.template operator()<true>();
}

}  // namespace flash_dmattn::cuda::sm90
