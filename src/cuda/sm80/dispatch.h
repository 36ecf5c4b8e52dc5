#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

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
    switch (choice.head_dim) {
      case 64: return with_class.template operator()<T, 64>();
      case 128: return with_class.template operator()<T, 128>();
      default: return with_class.template operator()<T, 256>();
    }
  };
  choice.dtype == DType::bf16 ? with_dtype.template operator()<__nv_bfloat16>()
                              : with_dtype.template operator()<__half>();
}

}  // namespace flash_dmattn::cuda::sm80
