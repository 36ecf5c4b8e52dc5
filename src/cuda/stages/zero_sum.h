#pragma once

#include <cstdint>

#include "flash_dmattn/execution.h"

namespace flash_dmattn::cuda {

// Subtracts the mean of each row's nonzero elements from these elements, so that they sum to 0. Results are limited to
// the largest float. Both arrays are dense, [rows, columns], and may be the same array.
void make_zero_sum(const float* gradient, float* out, std::int64_t rows, std::int64_t columns,
                   const Execution& execution);

}  // namespace flash_dmattn::cuda
