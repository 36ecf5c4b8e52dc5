#pragma once

#include "cuda/common/launch.h"
#include "cuda/sm80/backward_key_major.cuh"
#include "cuda/sm80/backward_query_major.cuh"
#include "cuda/sm80/launch.h"

namespace flash_dmattn::cuda::sm80 {

template <class T, int D, SharedClass S, bool Pairs, bool Ordered>
void launch_query_major_kernel(const QueryMajorParams& params, cudaStream_t stream) {
  using Kernel = BackwardKernel<T, D, backward_policy(D, S), Pairs, Ordered>;
  static_assert(sizeof(typename Kernel::SharedStorage) <= shared_bytes(S));
  launch<Kernel>(Kernel::blocks(params), params, stream);
}

template <class T, int D, SharedClass S, bool Pairs, bool Ordered>
void launch_key_major_kernel(const KeyMajorParams& params, cudaStream_t stream) {
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

// Calls body.template operator()<S, Pairs, Ordered>().
template <class Params, class Body>
void dispatch_backward(const Params& params, SharedClass shared, const Body& body) {
  const bool pairs = params.score.mask.per_query || params.score.bias.per_query;
  with_constant(params.turns.started != nullptr, [&]<bool Ordered>() {
    with_constant(pairs, [&]<bool Pairs>() {
      shared == SharedClass::kb99 ? body.template operator()<SharedClass::kb99, Pairs, Ordered>()
                                  : body.template operator()<SharedClass::kb163, Pairs, Ordered>();
    });
  });
}

template <class T, int D>
void launch_backward(const QueryMajorParams& params, SharedClass shared, cudaStream_t stream) {
  dispatch_backward(params, shared, [&]<SharedClass S, bool Pairs, bool Ordered>() {
    launch_query_major_kernel<T, D, S, Pairs, Ordered>(params, stream);
  });
}

template <class T, int D>
void launch_backward(const KeyMajorParams& params, SharedClass shared, cudaStream_t stream) {
  dispatch_backward(params, shared, [&]<SharedClass S, bool Pairs, bool Ordered>() {
    // Pairs whose additions take turns go by queries.
    launch_key_major_kernel<T, D, S, Pairs, Ordered && !Pairs>(params, stream);
  });
}

}  // namespace flash_dmattn::cuda::sm80
