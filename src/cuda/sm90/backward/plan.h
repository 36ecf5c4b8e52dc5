#pragma once

#include <string>
#include <vector>

#include "cuda/device.h"
#include "flash_dmattn/calls.h"

// The backwards of the family, for its row of the table (cuda/family.h).
namespace flash_dmattn::cuda::sm90 {

std::string decline_backward(const Problem& problem);
void plan_backward(const BackwardArgs& args, const Execution& execution, Plan<BackwardArgs>& plan);
std::vector<std::string> backward_names(const DeviceProperties& device);

}  // namespace flash_dmattn::cuda::sm90
