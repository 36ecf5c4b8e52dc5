#pragma once

#include <string>

#include "cuda/sm90/backward/policy.h"
#include "cuda/sm90/kernel_choice.h"
#include "flash_dmattn/attention.h"

// Chooses the kernel of a backward.
namespace flash_dmattn::cuda::sm90 {

using BackwardChoice = KernelChoice<BackwardVariant>;

std::string name(const BackwardChoice& choice);

BackwardChoice choose_backward(const BackwardArgs& args, bool has_slots);

}  // namespace flash_dmattn::cuda::sm90
