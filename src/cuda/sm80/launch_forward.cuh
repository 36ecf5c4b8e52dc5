#pragma once

#include "cuda/common/launch.h"
#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/launch.h"

namespace flash_dmattn::cuda::sm80 {

template <class T, int D, SharedClass S, bool Pairs>
void launch_forward_kernel(const ForwardParams& params, cudaStream_t stream) {
  using Kernel = ForwardKernel<T, D, forward_policy(D, S, Pairs), Pairs>;
  static_assert(sizeof(typename Kernel::SharedStorage) <= shared_bytes(S));
  launch<Kernel>(Kernel::blocks(params), params, stream);
}

template <class T, int D>
void launch_forward(const ForwardParams& params, SharedClass shared, cudaStream_t stream) {
  const bool pairs = params.score.mask.per_query || params.score.bias.per_query;
  if (shared == SharedClass::kb99) {
    pairs ? launch_forward_kernel<T, D, SharedClass::kb99, true>(params, stream)
          : launch_forward_kernel<T, D, SharedClass::kb99, false>(params, stream);
  } else {
    pairs ? launch_forward_kernel<T, D, SharedClass::kb163, true>(params, stream)
          : launch_forward_kernel<T, D, SharedClass::kb163, false>(params, stream);
  }
}

}  // namespace flash_dmattn::cuda::sm80
