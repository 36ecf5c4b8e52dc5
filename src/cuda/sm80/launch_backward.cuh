#pragma once

#include "cuda/common/launch.h"
#include "cuda/sm80/backward.cuh"
#include "cuda/sm80/backward_keys.cuh"
#include "cuda/sm80/launch.h"

namespace flash_dmattn::cuda::sm80 {

template <class T, int D, SharedClass S, bool Pairs, bool Ordered>
void launch_backward_kernel(const BackwardParams& params, cudaStream_t stream) {
  using Kernel = BackwardKernel<T, D, backward_policy(D, S), Pairs, Ordered>;
  static_assert(sizeof(typename Kernel::SharedStorage) <= shared_bytes(S));
  launch<Kernel>(Kernel::blocks(params), params, stream);
}

template <class T, int D, SharedClass S, bool Pairs, bool Ordered>
void launch_key_major_kernel(const BackwardParams& params, cudaStream_t stream) {
  if constexpr (has_key_major_backward(D, S)) {
    using Kernel = KeyMajorBackwardKernel<T, D, Pairs, Ordered>;
    static_assert(sizeof(typename Kernel::SharedStorage) <= shared_bytes(S));
    launch<Kernel>(Kernel::blocks(params), params, stream);
  }
}

// Calls body.template operator()<value>().
template <class Body>
void with_constant(bool value, const Body& body) {
  value ? body.template operator()<true>() : body.template operator()<false>();
}

template <class T, int D, SharedClass S>
void launch_backward_of_class(const BackwardParams& params, cudaStream_t stream) {
  const bool pairs = params.score.mask.per_query || params.score.bias.per_query;
  with_constant(params.turns.started != nullptr, [&]<bool Ordered>() {
    if (params.key_major) {
      with_constant(pairs, [&]<bool Pairs>() {
        // Pairs whose additions take turns go by queries.
        launch_key_major_kernel<T, D, S, Pairs, Ordered && !Pairs>(params, stream);
      });
    } else {
      with_constant(pairs, [&]<bool Pairs>() {
        launch_backward_kernel<T, D, S, Pairs, Ordered>(params, stream);
      });
    }
  });
}

template <class T, int D>
void launch_backward(const BackwardParams& params, SharedClass shared, cudaStream_t stream) {
  shared == SharedClass::kb99 ? launch_backward_of_class<T, D, SharedClass::kb99>(params, stream)
                              : launch_backward_of_class<T, D, SharedClass::kb163>(params, stream);
}

}  // namespace flash_dmattn::cuda::sm80
