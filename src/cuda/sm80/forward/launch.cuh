#pragma once

#include <stdexcept>

#include "cuda/primitives/launch.h"
#include "cuda/sm80/forward/kernel.cuh"
#include "cuda/sm80/launch.h"

namespace flash_dmattn::cuda::sm80 {

// Returns a value of the kernel's type.
template <class T, int D, SharedClass S, ForwardLoop Loop>
constexpr auto forward_kernel() {
  constexpr ForwardPolicy policy = forward_policy(D, S);
  constexpr ForwardPolicy dense_policy = dense_forward_policy(D, S);
  using enum ForwardLoop;
  if constexpr (Loop == key_range) {
    return ForwardKernel<T, D, policy, KeyScores<KvSource::consecutive>>();
  } else if constexpr (Loop == key_list) {
    return ForwardKernel<T, D, policy, KeyScores<KvSource::key_list>>();
  } else if constexpr (Loop == dense_elementwise) {
    return ForwardKernel<T, D, policy, ElementScores>();
  } else {
    return ForwardKernel<T, D, dense_policy, TileScores<Loop == dense_two_heads ? 2 : 1>>();
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
