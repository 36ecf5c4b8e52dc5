#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

#include "cuda/attention/compiled.h"
#include "cuda/primitives/convert.cuh"

// The kernels of the family that the build has.
namespace flash_dmattn::cuda::sm90 {

inline constexpr bool is_compiled = FLASH_DMATTN_HAS_SM90 != 0;

// Calls body.template operator()<T, D>() for a dtype and the bucket D of a head dim.
template <class Body>
void dispatch_bucket(DType dtype, int bucket, const Body& body) {
  const auto with_bucket = [&]<class T, int D>() {
    if constexpr (is_compiled && has_kernels_of(Element<T>::dtype, D)) {
      body.template operator()<T, D>();
    } else {
      throw std::logic_error("not compiled: sm90 kernels of " +
                             std::string(name_of(Element<T>::dtype)) + " with a head_dim of " +
                             std::to_string(D));
    }
  };
  const auto with_dtype = [&]<class T>() {
    switch (bucket) {
      case 64: return with_bucket.template operator()<T, 64>();
      case 96: return with_bucket.template operator()<T, 96>();
      case 128: return with_bucket.template operator()<T, 128>();
      case 192: return with_bucket.template operator()<T, 192>();
      default: return with_bucket.template operator()<T, 256>();
    }
  };
  dtype == DType::bf16 ? with_dtype.template operator()<__nv_bfloat16>()
                       : with_dtype.template operator()<__half>();
}

}  // namespace flash_dmattn::cuda::sm90
