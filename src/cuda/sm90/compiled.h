#pragma once

#include "flash_dmattn/types.h"

// The kernels of the family that the build has. src/cuda/sm90/CMakeLists.txt defines the macros.
namespace flash_dmattn::cuda::sm90 {

inline constexpr bool is_compiled = FLASH_DMATTN_HAS_SM90 != 0;

// Whether the build has kernels, in both directions, that do not overlap their products with other work. Test builds
// have them for one dtype and head-dim bucket.
constexpr bool has_no_overlap(DType dtype, int head_dim) {
  return FLASH_DMATTN_HAS_NO_OVERLAP != 0 && dtype == DType::bf16 && head_dim == 128;
}

}  // namespace flash_dmattn::cuda::sm90
