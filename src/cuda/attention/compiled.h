#pragma once

#include "flash_dmattn/types.h"

namespace flash_dmattn::cuda {

// Whether the build has kernels of a dtype and head-dim bucket. It has all, unless it only shows that kernels compile
// (FLASH_DMATTN_CUDA_ONLY_COMPILE). Then one bucket of f16 is enough, since those kernels differ from bf16's only by
// the functions of Element (convert.cuh). flash_dmattn_make_instances in CMakeLists.txt leaves out the same.
constexpr bool has_kernels_of(DType dtype, int bucket) {
  return !FLASH_DMATTN_ONLY_COMPILE || dtype == DType::bf16 || bucket == 64;
}

}  // namespace flash_dmattn::cuda
