#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/primitives/ptx.cuh"

// Starts kernels. The library has one generic __global__ function and one checked launch call.
namespace flash_dmattn::cuda {

class CudaError : public std::runtime_error {
 public:
  CudaError(cudaError_t error, const char* what)
      : std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(error)) {}
};

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw CudaError(error, what);
}

// Throws for calls that have to wait for the device, if the stream is being captured.
inline void refuse_capture(cudaStream_t stream, const char* why) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  if (status != cudaStreamCaptureStatusNone) {
    throw std::runtime_error(std::string("CUDA graph capture: ") + why);
  }
}

// ---- Kernels that follow each other -----------------------------------------------------------------
//
// With programmatic dependent launch, since sm_90, a kernel may start when every block of the previous kernel has ended
// or has allowed it, before the writes of that kernel are visible. All kernels here are launched in this way and wait
// before they access memory, which hides the latency of the launch. Only the kernels of few queries allow the next
// kernel to start earlier, after their main loop, because a launch takes a sixth of their time. Elsewhere waiting
// blocks would take resources from computing blocks and fill the multiprocessors that finish first, so that their grid
// is spread unevenly (docs/kernels/selection.md, "Launches"). Every kernel begins with wait_for_previous_kernel()
// (ptx.cuh), except that kernels of few queries first compute the addresses of their rows.

// A value for each device, made at its first use on that device.
template <class T>
class PerDevice {
 public:
  template <class Make>
  const T& get(const Make& make) {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    Slot& slot = slots_.at(static_cast<std::size_t>(device));
    std::call_once(slot.once, [&] { slot.value = make(device); });
    return slot.value;
  }

 private:
  struct Slot {
    std::once_flag once;
    T value{};
  };
  std::array<Slot, 64> slots_;
};

// Whether the code that a device runs for a kernel waits. The code of another target may be compiled for older GPUs.
inline bool waits_for_previous_kernel(const void* kernel, int device) {
  int major = 0;
  cudaFuncAttributes code;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "cudaDeviceGetAttribute");
  check(cudaFuncGetAttributes(&code, kernel), "cudaFuncGetAttributes");
  return major >= 9 && code.ptxVersion >= 90;
}

struct LaunchOptions {
  int cluster = 1;  // blocks of a cluster, which divide the blocks of the grid
  // Set for blocks that wait for each other in both directions. The grid then starts only when all blocks fit on the
  // GPU. Otherwise two such grids in two streams could each occupy multiprocessors that the other needs.
  bool cooperative = false;
};

struct Grid {
  std::int64_t blocks;
  int threads;
  std::size_t shared_bytes = 0;
  LaunchOptions options = {};
};

// Starts a one-dimensional grid unless it is empty. The function is static, like the host side that nvcc makes for a
// kernel template, so that each file sets the attributes of its own kernels.
template <auto kernel, class... Arguments>
static void launch_grid(const Grid& grid, cudaStream_t stream, Arguments&&... arguments) {
  if (grid.blocks == 0) return;
  static PerDevice<bool> waits;
  const auto* const code = reinterpret_cast<const void*>(kernel);
  std::array<cudaLaunchAttribute, 2> attributes{};
  unsigned count = 0;
  const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    attributes[count].id = id;
    return attributes[count++].val;
  };
  const auto [cluster, cooperative] = grid.options;
  if (cooperative) {
    add(cudaLaunchAttributeCooperative).cooperative = 1;
  } else if (waits.get([&](int device) { return waits_for_previous_kernel(code, device); })) {
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed =
        1;
  }
  if (cluster > 1) {
    add(cudaLaunchAttributeClusterDimension).clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = count;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...),
        "kernel launch");
}

// ---- Kernels ----------------------------------------------------------------------------------------

// A kernel is a functor with Params, `threads`, `min_blocks` (per multiprocessor) and SharedStorage. A kernel with the
// member `waits_itself` calls wait_for_previous_kernel by itself, before it accesses global memory.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::threads, Kernel::min_blocks)
    entry(const __grid_constant__ typename Kernel::Params params) {
  extern __shared__ __align__(1024) std::byte shared[];
  if constexpr (!requires { Kernel::waits_itself; }) wait_for_previous_kernel();
  Kernel()(params, *reinterpret_cast<typename Kernel::SharedStorage*>(shared));
}

// The number of blocks of the largest cluster that every GPU with clusters supports.
inline constexpr int portable_cluster = 8;

template <class Kernel>
static void launch(std::int64_t blocks, const typename Kernel::Params& params, cudaStream_t stream,
                   LaunchOptions options = {}) {
  if (blocks == 0) return;
  if (options.cluster > portable_cluster) {
    static PerDevice<bool> allowed;
    allowed.get([](int) {
      check(cudaFuncSetAttribute(entry<Kernel>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
            "cudaFuncSetAttribute");
      return true;
    });
  }
  constexpr std::size_t bytes = sizeof(typename Kernel::SharedStorage);
  if constexpr (bytes > 48 * 1024) {
    static PerDevice<bool> allowed;
    allowed.get([](int) {
      check(cudaFuncSetAttribute(entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(bytes)),
            "cudaFuncSetAttribute");
      return true;
    });
  }
  launch_grid<entry<Kernel>>({blocks, Kernel::threads, bytes, options}, stream, params);
}

// A kernel without shared memory that has one thread per item.
template <class Body>
__global__ void __launch_bounds__(256)
    for_each_entry(long items, const __grid_constant__ Body body) {
  wait_for_previous_kernel();
  const long step = static_cast<long>(gridDim.x) * blockDim.x;
  for (long i = static_cast<long>(blockIdx.x) * blockDim.x + threadIdx.x; i < items; i += step)
    body(i);
}

template <class Body>
static void for_each(long items, const Body& body, cudaStream_t stream) {
  const long blocks = std::min((items + 255) / 256, 65536l);
  launch_grid<for_each_entry<Body>>({blocks, 256}, stream, items, body);
}

}  // namespace flash_dmattn::cuda
