#include "device.h"

#include <dlfcn.h>
#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <stdexcept>

namespace flash_dmattn::binding {
namespace {

// torch's cudaStream_t (the id of a stable Stream is torch's own number, not the handle). The function is
// in libtorch_cuda.so, which a CPU-only torch lacks: this file has to load without it.
void* current_cuda_stream(std::int32_t device_index) {
  using Function = std::int32_t (*)(std::int32_t device_index, void** stream);
  static const auto function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return reinterpret_cast<Function>(
        library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  void* stream = nullptr;
  if (function == nullptr || function(device_index, &stream) != 0) {
    throw std::runtime_error(
        "flash_dmattn: this torch does not say what its current CUDA stream is");
  }
  return stream;
}

void run_on_torch_threads(void*, int workers, void (*body)(void* argument, int worker),
                          void* argument) {
  torch::stable::parallel_for(0, workers, 1, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t worker = begin; worker < end; ++worker) {
      body(argument, static_cast<int>(worker));
    }
  });
}

}  // namespace

CallDevice::CallDevice(const torch::stable::Tensor& tensor) {
  const torch::stable::Device device = tensor.device();
  if (!device.is_cuda()) return;
  guard_.emplace(device.index());
  stream_ = current_cuda_stream(device.index());
}

Execution CallDevice::execution(std::int64_t work) const {
  Execution execution;
  if (stream_) {
    execution.stream = *stream_;
    return execution;
  }
  constexpr std::int64_t grain = 32768;  // operations per thread; torch's own loops use the same
  const auto threads = static_cast<std::int64_t>(torch::stable::get_num_threads());
  execution.workers = static_cast<int>(
      std::clamp<std::int64_t>(work / grain, 1, std::max<std::int64_t>(threads, 1)));
  execution.parallel_for = run_on_torch_threads;
  return execution;
}

}  // namespace flash_dmattn::binding
