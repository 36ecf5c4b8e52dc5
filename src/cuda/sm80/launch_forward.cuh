#pragma once

#include "cuda/common/launch.h"
#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/forward_dense.cuh"
#include "cuda/sm80/launch.h"

namespace flash_dmattn::cuda::sm80 {

template <class Kernel, SharedClass S>
void launch_forward_kernel(const ForwardParams& params, cudaStream_t stream) {
  static_assert(sizeof(typename Kernel::SharedStorage) <= shared_bytes(S));
  launch<Kernel>(Kernel::blocks(params), params, stream);
}

template <class T, int D, SharedClass S>
void launch_dense_forward(const ForwardParams& params, cudaStream_t stream) {
  constexpr ForwardPolicy policy = forward_pairs_policy(D, S);
  using OneHead = DenseForwardKernel<T, D, policy, 1>;
  if constexpr (D <= 128) {
    using TwoHeads = DenseForwardKernel<T, D, policy, 2>;
    if (TwoHeads::takes(params)) {
      launch_forward_kernel<TwoHeads, S>(params, stream);
      return;
    }
  }
  if (OneHead::takes(params)) {
    launch_forward_kernel<OneHead, S>(params, stream);
  } else {
    launch_forward_kernel<ForwardKernel<T, D, forward_policy(D, S), KeySource::either, true>, S>(
        params, stream);
  }
}

template <class T, int D, SharedClass S>
void launch_forward_of_class(const ForwardParams& params, cudaStream_t stream) {
  if (!params.score.mask.per_query && !params.score.bias.per_query) {
    constexpr ForwardPolicy policy = forward_policy(D, S);
    if (params.plan.keys != nullptr) {
      launch_forward_kernel<ForwardKernel<T, D, policy, KeySource::list, false>, S>(params, stream);
    } else {
      launch_forward_kernel<ForwardKernel<T, D, policy, KeySource::consecutive, false>, S>(params,
                                                                                           stream);
    }
    return;
  }
  launch_dense_forward<T, D, S>(params, stream);
}

template <class T, int D>
void launch_forward(const ForwardParams& params, SharedClass shared, cudaStream_t stream) {
  shared == SharedClass::kb99 ? launch_forward_of_class<T, D, SharedClass::kb99>(params, stream)
                              : launch_forward_of_class<T, D, SharedClass::kb163>(params, stream);
}

}  // namespace flash_dmattn::cuda::sm80
