#pragma once

#include <cstddef>

#include "cpu/task.h"
#include "flash_dmattn/attention.h"

// The forward on the workers. With `slots` the keys of a (batch, kv head) are the taken slots of a KV cache, and its
// next victim is found on the way; there is one query then.
namespace flash_dmattn::cpu {

std::size_t forward_workspace_size(const ForwardArgs& args, const Execution& execution,
                                   const Slots& slots = {});
void forward(const ForwardArgs& args, const Execution& execution, const Slots& slots = {});

}  // namespace flash_dmattn::cpu
