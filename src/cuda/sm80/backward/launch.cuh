#pragma once

#include <stdexcept>

#include "cuda/primitives/launch.h"
#include "cuda/sm80/backward/key_major.cuh"
#include "cuda/sm80/backward/query_major.cuh"
#include "cuda/sm80/launch.h"

namespace flash_dmattn::cuda::sm80 {

// Returns a value of the kernel's type.
template <class T, BackwardChoice C>
constexpr auto backward_kernel() {
  using enum BackwardLoop;
  if constexpr (is_key_major(C.loop)) {
    return KeyMajorBackwardKernel<T, C.head_dim, C.loop == key_major_dense, C.ordered>();
  } else {
    return QueryMajorBackwardKernel<T, C.head_dim, backward_policy(C.head_dim, C.shared),
                                    C.loop == query_major_dense, C.ordered>();
  }
}

template <class T, BackwardChoice C, class Params>
void launch_backward_choice(const Params& params, cudaStream_t stream) {
  if constexpr (exists(C)) {
    using Kernel = OfClass<decltype(backward_kernel<T, C>()), C.shared>;
    static_assert(sizeof(typename Kernel::SharedStorage) <= shared_bytes(C.shared));
    launch<Kernel>(Kernel::blocks(params), params, stream);
  } else {
    throw std::logic_error("no such kernel: " + name(C));
  }
}

template <class T, int D, SharedClass S, BackwardLoop Loop, class Params>
void launch_backward_loop(bool ordered, const Params& params, cudaStream_t stream) {
  constexpr DType dtype = Element<T>::dtype;
  ordered ? launch_backward_choice<T, BackwardChoice{dtype, D, S, Loop, true}>(params, stream)
          : launch_backward_choice<T, BackwardChoice{dtype, D, S, Loop, false}>(params, stream);
}

template <class T, int D, SharedClass S>
void launch_backward(const BackwardChoice& choice, const QueryMajorParams& params,
                     cudaStream_t stream) {
  using enum BackwardLoop;
  if (is_key_major(choice.loop)) throw std::logic_error("not query-major: " + name(choice));
  choice.loop == query_major_dense
      ? launch_backward_loop<T, D, S, query_major_dense>(choice.ordered, params, stream)
      : launch_backward_loop<T, D, S, query_major>(choice.ordered, params, stream);
}

template <class T, int D, SharedClass S>
void launch_backward(const BackwardChoice& choice, const KeyMajorParams& params,
                     cudaStream_t stream) {
  using enum BackwardLoop;
  if (!is_key_major(choice.loop)) throw std::logic_error("not key-major: " + name(choice));
  choice.loop == key_major_dense
      ? launch_backward_loop<T, D, S, key_major_dense>(choice.ordered, params, stream)
      : launch_backward_loop<T, D, S, key_major>(choice.ordered, params, stream);
}

}  // namespace flash_dmattn::cuda::sm80
