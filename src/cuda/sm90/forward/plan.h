#pragma once

#include <string>
#include <vector>

#include "cuda/device.h"
#include "flash_dmattn/calls.h"

// The forwards of the family, for its row of the table (cuda/family.h).
namespace flash_dmattn::cuda::sm90 {

std::string decline_forward(const Problem& problem);
void plan_forward(const ForwardArgs& args, const Execution& execution, Plan<ForwardArgs>& plan);
std::vector<std::string> forward_names(const DeviceProperties& device);

}  // namespace flash_dmattn::cuda::sm90
