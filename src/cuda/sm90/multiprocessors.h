#pragma once

#include "cuda/common/launch.h"

namespace flash_dmattn::cuda::sm90 {

// Of the current device.
inline int multiprocessors() {
  int device = 0;
  int count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  return count;
}

}  // namespace flash_dmattn::cuda::sm90
