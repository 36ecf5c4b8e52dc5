#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "flash_dmattn/flash_dmattn.h"

// The device and the stream of a call. The device of the tensor is torch's current one for the lifetime of the object.
namespace flash_dmattn::binding {

class CallDevice {
 public:
  explicit CallDevice(const torch::stable::Tensor& tensor);

  Device device() const { return stream_ ? Device::cuda : Device::cpu; }

  // On a GPU it has torch's current stream. On the CPU it has torch.get_num_threads() of torch's threads as workers, or
  // fewer if `work` elementary operations take less time than waking them.
  Execution execution(std::int64_t work) const;

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  std::optional<void*> stream_;
};

}  // namespace flash_dmattn::binding
