#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device.h"

// Tests of the building blocks of kernels, each in a kernel of its own.
namespace flash_dmattn::cuda::unit {

// Device memory between guards, with the elements of a vector.
template <class T>
class DeviceArray {
 public:
  // `phase`: bytes that the first element lies past a 256-byte boundary.
  explicit DeviceArray(const std::vector<T>& values, std::size_t phase = 0)
      : size_(values.size()), buffer_(size_ * sizeof(T), phase) {
    buffer_.upload(values.data());
  }
  // All bytes 0xFF.
  explicit DeviceArray(std::size_t size, std::size_t phase = 0)
      : size_(size), buffer_(size * sizeof(T), phase) {}

  T* data() const { return reinterpret_cast<T*>(buffer_.data()); }
  std::vector<T> values() const {
    std::vector<T> result(size_);
    buffer_.download(result.data());
    return result;
  }

 private:
  std::size_t size_;
  testing::DeviceBuffer buffer_;
};

// body(shared) for every thread; `shared` is the block's dynamic shared memory, aligned to 1024 bytes.
template <class Body>
__global__ void run_body(Body body) {
  extern __shared__ __align__(1024) std::byte shared[];
  body(shared);
}

template <class Body>
void run(int blocks, int threads, std::size_t shared_bytes, const Body& body) {
  if (shared_bytes > 0) {
    testing::check_cuda(cudaFuncSetAttribute(run_body<Body>,
                                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(shared_bytes)));
  }
  run_body<<<blocks, threads, shared_bytes>>>(body);
  testing::check_cuda(cudaGetLastError());
  testing::check_cuda(cudaDeviceSynchronize());
}

using CudaUnit = testing::OnDevice;

}  // namespace flash_dmattn::cuda::unit
