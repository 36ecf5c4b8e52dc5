#pragma once

#include "cpu/task.h"
#include "flash_dmattn/execution.h"

namespace flash_dmattn::cpu {

// Writes the gradient of a bias without a key or without a query dimension (DbiasKind::per_key, per_query) from the sums of
// all units.
void reduce_dbias(const BackwardTask& task, const Execution& execution);

}  // namespace flash_dmattn::cpu
