#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend.h"
#include "flash_dmattn/calls.h"
#include "support/data.h"
#include "support/run.h"
#include "support/tensor.h"

// The common parts of tests on a GPU: copies of host data on the device, each of them between guards, calls and streams.
namespace flash_dmattn::testing {

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// A test that is skipped where there is no GPU.
class OnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    const BackendInfo info = cuda_backend.info();
    if (!info.available) GTEST_SKIP() << info.reason;
  }
};

// `bytes` bytes of device memory between two guards, all 0xFF at first; its address is `phase`
// modulo 256. The destructor fails the running test if a guard has changed.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t bytes, std::size_t phase = 0) : bytes_(bytes), phase_(phase) {
    check_cuda(cudaMalloc(&base_, total()));
    check_cuda(cudaMemset(base_, 0xFF, total()));
  }
  // A copy of host memory.
  template <class T>
  explicit DeviceBuffer(const std::vector<T>& host) : DeviceBuffer(host.size() * sizeof(T)) {
    upload(host.data());
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
  std::size_t size() const { return bytes_; }
  operator std::span<std::byte>() const { return {data(), bytes_}; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }
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

template <class T>
std::vector<T> download(const DeviceBuffer& buffer, std::int64_t count) {
  std::vector<T> host(static_cast<std::size_t>(count));
  if (count > 0) buffer.download(host.data());
  return host;
}

// A workspace on the device, and the execution that has it.
class DeviceWorkspace {
 public:
  explicit DeviceWorkspace(std::size_t bytes) : memory_(bytes) {
    execution_.workspace = memory_.data();
    execution_.workspace_bytes = bytes;
  }
  operator const Execution&() const { return execution_; }

 private:
  DeviceBuffer memory_;
  Execution execution_;
};

// Runs a call with a workspace on the device, and waits for it.
template <class Args>
void run_on_device(const CheckedCall<Args>& call) {
  const DeviceBuffer workspace(call.workspace_size());
  call.run(workspace);
  check_cuda(cudaDeviceSynchronize());
}

// A stream that does not wait for the default one.
class Stream {
 public:
  Stream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// The work that enqueue(stream) captures.
class Graph {
 public:
  template <class Enqueue>
  explicit Graph(const Enqueue& enqueue) {
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    enqueue(cudaStream_t(stream_));
    cudaGraph_t captured = nullptr;
    check_cuda(cudaStreamEndCapture(stream_, &captured));
    check_cuda(cudaGraphInstantiate(&graph_, captured, 0));
    check_cuda(cudaGraphDestroy(captured));
  }
  ~Graph() { cudaGraphExecDestroy(graph_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Runs the work, and waits for it.
  void replay(int times) const {
    for (int i = 0; i < times; ++i) check_cuda(cudaGraphLaunch(graph_, stream_));
    check_cuda(cudaStreamSynchronize(stream_));
  }

 private:
  Stream stream_;
  cudaGraphExec_t graph_ = nullptr;
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
