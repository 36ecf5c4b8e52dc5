#pragma once

#include <cstdint>

#include "flash_dmattn/execution.h"
#include "flash_dmattn/types.h"

namespace flash_dmattn {

// A gradient of scores whose rows have to sum to 0, because a softmax ignores what all scores of a row share.
struct ZeroSumArgs {
  Device device = Device::cuda;     // of both arrays
  const float* gradient = nullptr;  // [rows, columns] dense
  float* out = nullptr;             // [rows, columns] dense; may be the same array
  std::int64_t rows = -1;
  std::int64_t columns = -1;
};

// Subtracts the mean of each row's nonzero elements from these elements. Results are limited to the largest float. Only
// GPUs have it, and the call only enqueues work.
void zero_sum(const ZeroSumArgs& args, const Execution& execution);

}  // namespace flash_dmattn
