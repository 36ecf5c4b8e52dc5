#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "flash_dmattn/flash_dmattn.h"

// Where a call computes. While one of these lives, the device of its tensor is the current one.
namespace flash_dmattn::binding {

class CallDevice {
 public:
  explicit CallDevice(const torch::stable::Tensor& tensor);

  Device device() const { return stream_ ? Device::cuda : Device::cpu; }

  // On a GPU: the stream that is current in torch. On the CPU: torch's own threads, torch.get_num_threads() of
  // them, or fewer where `work` elementary operations are not worth waking them.
  Execution execution(std::int64_t work) const;

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  std::optional<void*> stream_;
};

}  // namespace flash_dmattn::binding
