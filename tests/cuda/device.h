#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/data.h"
#include "support/run.h"
#include "support/tensor.h"

// Copies of the tests' host data on the device, every one of them between guards.
namespace flash_dmattn::testing {

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// `bytes` bytes of device memory between two guards, all 0xFF at first; its address is `phase`
// modulo 256. The destructor fails the running test if a guard has changed.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t bytes, std::size_t phase = 0) : bytes_(bytes), phase_(phase) {
    check_cuda(cudaMalloc(&base_, total()));
    check_cuda(cudaMemset(base_, 0xFF, total()));
  }
  ~DeviceBuffer() {
    std::vector<unsigned char> host(total());
    EXPECT_EQ(cudaMemcpy(host.data(), base_, total(), cudaMemcpyDeviceToHost), cudaSuccess);
    const auto is_guard = [](unsigned char byte) { return byte == 0xFF; };
    const auto begin = host.begin() + static_cast<std::ptrdiff_t>(guard + phase_);
    EXPECT_TRUE(std::all_of(host.begin(), begin, is_guard)) << "written before a device buffer";
    EXPECT_TRUE(std::all_of(begin + static_cast<std::ptrdiff_t>(bytes_), host.end(), is_guard))
        << "written after a device buffer";
    cudaFree(base_);
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  std::byte* data() const { return base_ + guard + phase_; }
  void upload(const void* from) {
    check_cuda(cudaMemcpy(data(), from, bytes_, cudaMemcpyHostToDevice));
  }
  void download(void* to) const {
    check_cuda(cudaMemcpy(to, data(), bytes_, cudaMemcpyDeviceToHost));
  }
  // All of it 0xFF again, in the order of a stream.
  void poison(cudaStream_t stream) const {
    check_cuda(cudaMemsetAsync(data(), 0xFF, bytes_, stream));
  }

 private:
  static constexpr std::size_t guard = 1024;
  std::size_t total() const { return 2 * guard + 256 + bytes_; }

  std::byte* base_ = nullptr;
  std::size_t bytes_;
  std::size_t phase_;
};

// The memory that a tensor's elements span, gaps included, at the same alignment.
class DeviceTensor {
 public:
  explicit DeviceTensor(Tensor& tensor)
      : view_(tensor.view()), span_(span_of(tensor)), buffer_(span_.bytes, phase()) {
    if (span_.bytes > 0) buffer_.upload(host_begin());
  }

  Tensor4 view() const {
    if (span_.bytes == 0) return {nullptr, view_.stride};
    return {buffer_.data() + span_.before, view_.stride};
  }
  template <class T>
  T* data() const {
    return static_cast<T*>(view().data);
  }
  void download() { download(host_begin()); }
  // All that lies between the first and the last element.
  std::size_t bytes() const { return span_.bytes; }
  void download(std::byte* to) const {
    if (span_.bytes > 0) buffer_.download(to);
  }
  void poison(cudaStream_t stream) const { buffer_.poison(stream); }

 private:
  struct Span {
    std::size_t before = 0;  // bytes before element {0, 0, 0, 0}
    std::size_t bytes = 0;
  };

  static std::int64_t bytes_of(Element element) {
    switch (element) {
      case Element::u8: return 1;
      case Element::f32: return 4;
      case Element::f64: return 8;
      default: return 2;
    }
  }

  static Span span_of(const Tensor& tensor) {
    if (tensor.elements() == 0) return {};
    const std::int64_t size = bytes_of(tensor.element());
    std::int64_t low = 0;
    std::int64_t high = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      const std::int64_t reach = (tensor.shape()[i] - 1) * tensor.stride()[i];
      (reach < 0 ? low : high) += reach;
    }
    return {static_cast<std::size_t>(-low * size),
            static_cast<std::size_t>((high - low + 1) * size)};
  }

  std::byte* host_begin() const { return static_cast<std::byte*>(view_.data) - span_.before; }
  std::size_t phase() const { return reinterpret_cast<std::uintptr_t>(host_begin()) % 256; }

  Tensor4 view_;
  Span span_;
  DeviceBuffer buffer_;
};

}  // namespace flash_dmattn::testing
