#pragma once

#include <string>

// Facts about the GPU and the environment, each read once.
namespace flash_dmattn::cuda {

struct DeviceProperties {
  int index = 0;
  int compute_capability = 0;  // 90 for 9.0
  // That the code which runs on it was compiled for; 80 where a library has nothing newer.
  int code_capability = 0;
  int multiprocessors = 0;
  // Bytes of shared memory that a block can have. FLASH_DMATTN_MAX_SHARED_KB lowers them, so that the kernels
  // of smaller GPUs run on a larger one.
  int shared_bytes = 0;
};

// Blocks of the largest cluster that a GPU can run; 1: it has no clusters, or its code was compiled without them.
int most_cluster_blocks(const DeviceProperties& device);

// Why the process has no GPU to compute on; "" when it has one.
const std::string& decline_driver();

// Of the current device. Throws CudaError where there is none.
const DeviceProperties& current_device();

// "9.0"
std::string compute_capability(const DeviceProperties& device);

// "NVIDIA H200, compute capability 9.0", of the current device.
std::string device_name();

// The newest family that may be used: FLASH_DMATTN_CUDA_FAMILY, or "" for no cap.
const std::string& family_cap();

}  // namespace flash_dmattn::cuda
