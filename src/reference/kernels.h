#pragma once

#include "backend.h"

namespace flash_dmattn::reference {

// The functions of the reference are the kernels of every problem.
const KernelSet* kernel_set();

extern const KvBackend kv_backend;

}  // namespace flash_dmattn::reference
