#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

#include "cuda/sm80/kernel_choice.h"

namespace flash_dmattn::cuda::sm80 {

// Whether the build has forward kernels of a class.
constexpr bool has_forward(int head_dim_bucket, SharedClass shared) {
  return head_dim_bucket > most_sm90_forward ||
         (shared == SharedClass::kb99 ? FLASH_DMATTN_HAS_KB99_FORWARD != 0
                                      : FLASH_DMATTN_HAS_KB163_FORWARD != 0);
}

// Calls body.template operator()<T, D, S>() for a choice.
template <class Choice, class Body>
void dispatch(const Choice& choice, const Body& body) {
  const auto compiled = [&]<class T, int D, SharedClass S>() {
    if constexpr (S == SharedClass::kb99 ? FLASH_DMATTN_HAS_KB99 != 0
                                         : FLASH_DMATTN_HAS_KB163 != 0) {
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
