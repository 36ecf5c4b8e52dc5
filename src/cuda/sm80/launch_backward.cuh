#pragma once

#include "cuda/common/launch.h"
#include "cuda/sm80/backward.cuh"
#include "cuda/sm80/backward_keys.cuh"
#include "cuda/sm80/launch.h"

namespace flash_dmattn::cuda::sm80 {

template <class T, int D, SharedClass S, bool Pairs>
void launch_backward_kernel(const BackwardParams& params, cudaStream_t stream) {
  using Kernel = BackwardKernel<T, D, backward_policy(D, S), Pairs>;
  static_assert(sizeof(typename Kernel::SharedStorage) <= shared_bytes(S));
  launch<Kernel>(Kernel::blocks(params), params, stream);
}

template <class T, int D, SharedClass S>
void launch_key_major_kernel(const BackwardParams& params, cudaStream_t stream) {
  if constexpr (has_key_major_backward(D, S)) {
    using Kernel = KeyMajorBackwardKernel<T, D>;
    static_assert(sizeof(typename Kernel::SharedStorage) <= shared_bytes(S));
    launch<Kernel>(Kernel::blocks(params), params, stream);
  }
}

template <class T, int D>
void launch_backward(const BackwardParams& params, SharedClass shared, cudaStream_t stream) {
  if (params.key_major) {
    shared == SharedClass::kb99 ? launch_key_major_kernel<T, D, SharedClass::kb99>(params, stream)
                                : launch_key_major_kernel<T, D, SharedClass::kb163>(params, stream);
    return;
  }
  const bool pairs = params.score.mask.per_query || params.score.bias.per_query;
  if (shared == SharedClass::kb99) {
    pairs ? launch_backward_kernel<T, D, SharedClass::kb99, true>(params, stream)
          : launch_backward_kernel<T, D, SharedClass::kb99, false>(params, stream);
  } else {
    pairs ? launch_backward_kernel<T, D, SharedClass::kb163, true>(params, stream)
          : launch_backward_kernel<T, D, SharedClass::kb163, false>(params, stream);
  }
}

}  // namespace flash_dmattn::cuda::sm80
