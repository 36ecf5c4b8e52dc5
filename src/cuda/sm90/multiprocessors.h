#pragma once

#include "cuda/common/launch.h"

namespace flash_dmattn::cuda::sm90 {

// Of the current device.
inline int multiprocessors() {
  static PerDevice<int> counts;
  return counts.get([](int device) {
    int count = 0;
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
          "cudaDeviceGetAttribute");
    return count;
  });
}

}  // namespace flash_dmattn::cuda::sm90
