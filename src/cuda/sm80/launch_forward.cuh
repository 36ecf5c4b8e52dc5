#pragma once

#include <stdexcept>

#include "cuda/common/launch.h"
#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/forward_dense.cuh"
#include "cuda/sm80/launch.h"

namespace flash_dmattn::cuda::sm80 {

// A value of the kernel's type.
template <class T, int D, SharedClass S, ForwardLoop Loop>
constexpr auto forward_kernel() {
  constexpr ForwardPolicy policy = forward_policy(D, S);
  constexpr ForwardPolicy dense = dense_forward_policy(D, S);
  if constexpr (Loop == ForwardLoop::key_range) {
    return ForwardKernel<T, D, policy, KvSource::consecutive, false>();
  } else if constexpr (Loop == ForwardLoop::key_list) {
    return ForwardKernel<T, D, policy, KvSource::key_list, false>();
  } else if constexpr (Loop == ForwardLoop::dense_elementwise) {
    return ForwardKernel<T, D, policy, KvSource::either, true>();
  } else {
    constexpr int heads = Loop == ForwardLoop::dense_two_heads ? 2 : 1;
    return DenseForwardKernel<T, D, dense, heads>();
  }
}

template <class T, int D, SharedClass S, ForwardLoop Loop>
void launch_forward_loop(const ForwardParams& params, cudaStream_t stream) {
  constexpr ForwardChoice choice{Element<T>::dtype, D, S, Loop};
  if constexpr (exists(choice)) {
    using Kernel = OfClass<decltype(forward_kernel<T, D, S, Loop>()), S>;
    static_assert(sizeof(typename Kernel::SharedStorage) <= shared_bytes(S));
    launch<Kernel>(Kernel::blocks(params), params, stream);
  } else {
    throw std::logic_error("no such kernel: " + name(choice));
  }
}

template <class T, int D, SharedClass S>
void launch_forward(ForwardLoop loop, const ForwardParams& params, cudaStream_t stream) {
  using enum ForwardLoop;
  switch (loop) {
    case key_range: return launch_forward_loop<T, D, S, key_range>(params, stream);
    case key_list: return launch_forward_loop<T, D, S, key_list>(params, stream);
    case dense_elementwise: return launch_forward_loop<T, D, S, dense_elementwise>(params, stream);
    case dense: return launch_forward_loop<T, D, S, dense>(params, stream);
    case dense_two_heads: return launch_forward_loop<T, D, S, dense_two_heads>(params, stream);
  }
}

}  // namespace flash_dmattn::cuda::sm80
