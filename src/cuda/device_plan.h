#pragma once

#include <cstddef>
#include <span>

#include "cuda/device.h"
#include "plan.h"

namespace flash_dmattn::cuda {

// A call as the plans of a GPU hold it (plan.h). What a call decides depends on the device that was current, such as on its
// number of multiprocessors, so the call throws std::runtime_error when another device is current.
template <class Call>
class OnDevice : public Call {
 public:
  using Call::Call;
  explicit OnDevice(const Call& call) : Call(call) {}

  template <class Args>
  void run(const Args& args, const Execution& execution) const {
    require_current_device(device_);
    Call::run(args, execution);
  }

  auto build(std::span<std::byte> memory, const Execution& execution) const {
    require_current_device(device_);
    return Call::build(memory, execution);
  }

 private:
  int device_ = current_device().index;
};

}  // namespace flash_dmattn::cuda
