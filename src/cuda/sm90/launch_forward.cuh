#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/common/launch.h"
#include "cuda/sm90/fix_forward.cuh"
#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/multiprocessors.h"
#include "cuda/sm90/prepare_forward.cuh"
#include "cuda/sm90/tensor_map.h"

namespace flash_dmattn::cuda::sm90 {

template <class Kernel>
void launch_forward_kernel(ForwardKernelParams params, cudaStream_t stream) {
  using T = typename Kernel::Element;
  constexpr ForwardPolicy policy = Kernel::policy;
  constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>;
  const ForwardParams& p = params.forward;
  const Shape& shape = p.shape;
  if (Kernel::load != KeyLoad::any) {
    params.q_map = make_tensor_map(p.q, shape.head_dim, shape.seqlen_q, shape.heads_q, shape.batch,
                                   policy.rows(), bf16);
  }
  if (Kernel::load == KeyLoad::tma) {
    const auto map = [&](const InputRows& tensor) {
      return make_tensor_map(tensor, shape.head_dim, shape.seqlen_k, shape.heads_kv, shape.batch,
                             policy.keys, bf16);
    };
    params.k_map = map(p.k);
    params.v_map = map(p.v);
  }
  if (!Kernel::has_key_info) params.info = {};
  params.work_tiles = WorkTile::count(shape, policy.rows());
  const float bias_factor =
      Kernel::load == KeyLoad::any && shapes_scores(p) ? log2e : 1 / p.score.scale;
  const PrepareForward<T> prepare{
      {p.shape, p.score, params.info, bias_factor}, params.next_work, params.needs_fix};
  for_each(prepare.items(), prepare, stream);
  launch<Kernel>(Kernel::blocks(multiprocessors(), params.work_tiles), params, stream);
  launch<FixForwardKernel<T>>(2 * multiprocessors(), params, stream);
}

template <class T, int D>
void launch_forward(const ForwardChoice& choice, const ForwardParams& p,
                    const ForwardWorkspace& workspace, cudaStream_t stream) {
  if (p.shape.batch * p.shape.heads_q * p.shape.seqlen_q == 0) return;
  ForwardKernelParams params{};
  params.forward = p;
  params.info = workspace.info;
  params.next_work = workspace.next_work;
  params.needs_fix = workspace.needs_fix;
  const auto launch_kernel = [&]<KeyLoad Load, bool HasKeyInfo>() {
    launch_forward_kernel<ForwardKernel<T, D, Load, HasKeyInfo>>(params, stream);
  };
  switch (choice.load) {
    case KeyLoad::tma:
      return choice.has_key_info ? launch_kernel.template operator()<KeyLoad::tma, true>()
                                 : launch_kernel.template operator()<KeyLoad::tma, false>();
    case KeyLoad::gather: return launch_kernel.template operator()<KeyLoad::gather, true>();
    case KeyLoad::any: return launch_kernel.template operator()<KeyLoad::any, true>();
  }
}

}  // namespace flash_dmattn::cuda::sm90
