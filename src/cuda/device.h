#pragma once

#include <string>

// Facts about the GPU and the environment, each read once.
namespace flash_dmattn::cuda {

struct DeviceProperties {
  int index = 0;
  int compute_capability = 0;  // 90 for 9.0
  // The capability that the code running on the GPU was compiled for; 80 if the library has nothing newer.
  int code_capability = 0;
  int multiprocessors = 0;
  // The most shared memory of a block, in bytes. FLASH_DMATTN_MAX_SHARED_KB lowers it, so that the kernels of
  // smaller GPUs run on a larger one.
  int shared_bytes = 0;
};

// The number of blocks of the largest cluster that a GPU can run; 1 if it has no clusters, or its code was compiled
// without them.
int most_cluster_blocks(const DeviceProperties& device);

// The reason why the process has no GPU to compute on; "" if it has one.
const std::string& decline_driver();

// The properties of the current device. Throws CudaError if there is none.
const DeviceProperties& current_device();

// Throws std::runtime_error if the device with this index is not the current device.
void require_current_device(int planned);

// Formats the compute capability, as in "9.0".
std::string compute_capability(const DeviceProperties& device);

// Describes the current device, as in "NVIDIA H200, compute capability 9.0".
std::string device_name();

// The newest family that may be used: FLASH_DMATTN_CUDA_FAMILY, or "" for no cap.
const std::string& family_cap();

}  // namespace flash_dmattn::cuda
