#include "cuda/device.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <system_error>

#include "cuda/primitives/launch.h"
#include "flash_dmattn/error.h"

namespace flash_dmattn::cuda {
namespace {

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int max_shared_bytes() {
  static const std::string cap = environment("FLASH_DMATTN_MAX_SHARED_KB");
  if (cap.empty()) return std::numeric_limits<int>::max();
  int kilobytes = 0;
  const auto [end, error] = std::from_chars(cap.data(), cap.data() + cap.size(), kilobytes);
  if (error != std::errc() || end != cap.data() + cap.size() || kilobytes < 1 || kilobytes > 1024) {
    throw InvalidArgument("FLASH_DMATTN_MAX_SHARED_KB", cap, "a number of KB in [1, 1024]");
  }
  return kilobytes * 1024;
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

__global__ void empty_kernel() {}

int code_capability() {
  cudaFuncAttributes code;
  check(cudaFuncGetAttributes(&code, empty_kernel), "cudaFuncGetAttributes");
  return code.ptxVersion;
}

// `device` is the current device.
DeviceProperties read_properties(int device) {
  return {.index = device,
          .compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
                                attribute(cudaDevAttrComputeCapabilityMinor, device),
          .code_capability = code_capability(),
          .multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device),
          .shared_bytes = std::min(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                                   max_shared_bytes())};
}

std::string find_driver() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();  // clear the error, which the caller's own calls would report
    int driver = 0;
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) return "no NVIDIA driver";
    return std::string("no CUDA device: ") + cudaGetErrorString(error);
  }
  return count == 0 ? "no CUDA device" : "";
}

}  // namespace

int most_cluster_blocks(const DeviceProperties& device) {
  if (device.code_capability < 90) return 1;
  return device.compute_capability < 120 ? 16 : portable_cluster;
}

const std::string& decline_driver() {
  static const std::string reason = find_driver();
  return reason;
}

const DeviceProperties& current_device() {
  static PerDevice<DeviceProperties> known;
  return known.get(read_properties);
}

void require_current_device(int planned) {
  const int current = current_device().index;
  if (current == planned) return;
  throw std::runtime_error("CUDA: the call was planned for device " + std::to_string(planned) +
                           ", and the current device is " + std::to_string(current));
}

std::string compute_capability(const DeviceProperties& device) {
  return std::to_string(device.compute_capability / 10) + "." +
         std::to_string(device.compute_capability % 10);
}

std::string device_name() {
  const DeviceProperties& device = current_device();
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device.index), "cudaGetDeviceProperties");
  return std::string(properties.name) + ", compute capability " + compute_capability(device);
}

const std::string& family_cap() {
  static const std::string cap = environment("FLASH_DMATTN_CUDA_FAMILY");
  return cap;
}

}  // namespace flash_dmattn::cuda
