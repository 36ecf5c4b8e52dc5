#pragma once

#include "cuda/common/launch.h"

namespace flash_dmattn::cuda::sm90 {

// A grid whose blocks wait for each other in both directions: it starts only when all of them find a place. Two such
// grids of two streams would else each hold multiprocessors that the other's blocks need.
template <class Kernel>
static void launch_cooperative(std::int64_t blocks, const typename Kernel::Params& params,
                               cudaStream_t stream) {
  constexpr std::size_t bytes = sizeof(typename Kernel::SharedStorage);
  static PerDevice<bool> allowed;
  allowed.get([](int) {
    check(cudaFuncSetAttribute(entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)),
          "cudaFuncSetAttribute");
    return true;
  });
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(Kernel::threads));
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, entry<Kernel>, params), "cooperative kernel launch");
}

}  // namespace flash_dmattn::cuda::sm90
