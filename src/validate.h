#pragma once

#include <cstddef>

#include "backend.h"
#include "flash_dmattn/attention.h"

// The checks of all arguments, before anything is written. Each throws InvalidArgument.
namespace flash_dmattn {

// Afterwards no product of dimensions that a tensor or a workspace is made of overflows.
void validate(const Problem& problem);

// Checks what workspace sizes depend on (the problem has been validated) and returns the inputs as
// backends see them: a mask, a bias, intervals and a plan have stride 0 wherever their size is 1.
Inputs validated(const Problem& problem, const Inputs& in, const Backend& backend);

// Check what is left of the arguments of a call and return them as backends see them.
ForwardArgs validated(const ForwardArgs& args, const Backend& backend);
BackwardArgs validated(const BackwardArgs& args, const Backend& backend);

}  // namespace flash_dmattn
