#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "cuda/common/device_workspace.h"
#include "cuda/common/integers.h"
#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"

// Includes that the kernels of selection and tile lists share.
namespace flash_dmattn::cuda {

// The number of bits that hold the values [0, count).
constexpr int bits_for(std::int64_t count) {
  int bits = 0;
  while ((std::int64_t{1} << bits) < count) ++bits;
  return bits;
}

}  // namespace flash_dmattn::cuda
