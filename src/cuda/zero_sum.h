#pragma once

#include <cstdint>

#include "flash_dmattn/execution.h"

namespace flash_dmattn::cuda {

// Subtracts from the elements of each row that are not 0 their mean, so that they sum to 0; results are limited to the
// largest float. Both arrays are dense, [rows, columns], and may be one.
void make_zero_sum(const float* gradient, float* out, std::int64_t rows, std::int64_t columns,
                   const Execution& execution);

}  // namespace flash_dmattn::cuda
