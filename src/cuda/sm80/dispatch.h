#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <stdexcept>
#include <utility>

#include "cuda/attention/compiled.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/sm80/kernel_choice.h"
#include "sm80/compiled.h"

namespace flash_dmattn::cuda::sm80 {

// Calls body.template operator()<T, D, S>() for a choice.
template <class Choice, class Body>
void dispatch(const Choice& choice, const Body& body) {
  const auto compiled = [&]<class T, int D, SharedClass S>() {
    if constexpr (has_kernels(S) && has_kernels_of(Element<T>::dtype, D)) {
      body.template operator()<T, D, S>();
    } else {
      throw std::logic_error("not compiled: " + name(choice));
    }
  };
  const auto with_class = [&]<class T, int D>() {
    choice.shared == SharedClass::kb99 ? compiled.template operator()<T, D, SharedClass::kb99>()
                                       : compiled.template operator()<T, D, SharedClass::kb163>();
  };
  const auto with_dtype = [&]<class T>() {
    [&]<std::size_t... i>(std::index_sequence<i...>) {
      const bool found = ((choice.head_dim == head_dims[i] &&
                           (with_class.template operator()<T, head_dims[i]>(), true)) ||
                          ...);
      if (!found) throw std::logic_error("no such kernel: " + name(choice));
    }(std::make_index_sequence<head_dims.size()>());
  };
  choice.dtype == DType::bf16 ? with_dtype.template operator()<__nv_bfloat16>()
                              : with_dtype.template operator()<__half>();
}

}  // namespace flash_dmattn::cuda::sm80
