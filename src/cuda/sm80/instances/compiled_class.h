#pragma once

#include "cuda/sm80/policy.h"

namespace flash_dmattn::cuda::sm80 {

// The class that a build target compiles the instances for (src/cuda/CMakeLists.txt).
constexpr SharedClass compiled_class = SharedClass::FLASH_DMATTN_SHARED_CLASS;

}  // namespace flash_dmattn::cuda::sm80
