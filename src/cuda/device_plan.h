#pragma once

#include "common/plan_content.h"
#include "cuda/device.h"

namespace flash_dmattn::cuda {

// The content of a plan on a GPU (common/plan_content.h). Its decisions depend on the device that was current, such as
// on its number of multiprocessors, so it throws std::runtime_error when another device is current.
template <class Content>
class OnDevice : public Content {
 public:
  using Content::Content;

  template <class Args>
  void run(const Args& args, const Execution& execution) const {
    require_current_device(device_);
    Content::run(args, execution);
  }

 private:
  int device_ = current_device().index;
};

}  // namespace flash_dmattn::cuda
