#pragma once

#include <cstddef>

#include "cpu/task.h"
#include "flash_dmattn/attention.h"

// Runs the forward on the workers. With `slots`, the call has one query, the keys of a (batch, kv head) are the
// occupied slots of a KV cache, and the call also finds the cache's next victim.
namespace flash_dmattn::cpu {

std::size_t forward_workspace_size(const ForwardArgs& args, const Execution& execution,
                                   const Slots& slots = {});
void forward(const ForwardArgs& args, const Execution& execution, const Slots& slots = {});

}  // namespace flash_dmattn::cpu
