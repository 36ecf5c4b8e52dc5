#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <stdexcept>
#include <string>

// How a kernel is started: one generic __global__ function and one checked call serve the library.
namespace flash_dmattn::cuda {

class CudaError : public std::runtime_error {
 public:
  CudaError(cudaError_t error, const char* what)
      : std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(error)) {}
};

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw CudaError(error, what);
}

// For calls that have to wait for the device, which a stream that is being captured cannot.
inline void refuse_capture(cudaStream_t stream, const char* why) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  if (status != cudaStreamCaptureStatusNone) {
    throw std::runtime_error(std::string("CUDA graph capture: ") + why);
  }
}

// A kernel is a functor with Params, `threads`, `min_blocks` (per multiprocessor) and
// SharedStorage.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::threads, Kernel::min_blocks)
    entry(const __grid_constant__ typename Kernel::Params params) {
  extern __shared__ __align__(1024) std::byte shared[];
  Kernel()(params, *reinterpret_cast<typename Kernel::SharedStorage*>(shared));
}

template <class Kernel>
void launch(long blocks, const typename Kernel::Params& params, cudaStream_t stream) {
  if (blocks == 0) return;
  constexpr std::size_t bytes = sizeof(typename Kernel::SharedStorage);
  if constexpr (bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)),
          "cudaFuncSetAttribute");
  }
  entry<Kernel><<<static_cast<unsigned>(blocks), Kernel::threads, bytes, stream>>>(params);
  check(cudaGetLastError(), "kernel launch");
}

// For kernels without shared memory: one thread per item.
template <class Body>
__global__ void __launch_bounds__(256)
    for_each_entry(long items, const __grid_constant__ Body body) {
  const long step = static_cast<long>(gridDim.x) * blockDim.x;
  for (long i = static_cast<long>(blockIdx.x) * blockDim.x + threadIdx.x; i < items; i += step)
    body(i);
}

template <class Body>
void for_each(long items, const Body& body, cudaStream_t stream) {
  if (items == 0) return;
  const long blocks = (items + 255) / 256;
  for_each_entry<<<static_cast<unsigned>(blocks < 65536 ? blocks : 65536), 256, 0, stream>>>(items,
                                                                                             body);
  check(cudaGetLastError(), "kernel launch");
}

}  // namespace flash_dmattn::cuda
