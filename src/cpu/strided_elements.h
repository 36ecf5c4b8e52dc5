#pragma once

#include <array>
#include <cstdint>

#include "backend.h"
#include "flash_dmattn/types.h"

// Passes over the elements of a tensor with any strides, one at a time.
namespace flash_dmattn::cpu {

// Does nothing if the tensor has no data.
void store_zeros(const Tensor4& tensor, DType dtype, const std::array<std::int64_t, 4>& shape);

// Implements Backend::first_nonfinite.
NonFiniteElement first_nonfinite(const ConstTensor4& tensor,
                                 const std::array<std::int64_t, 4>& shape, DType dtype,
                                 bool minus_inf, const Execution& execution);

}  // namespace flash_dmattn::cpu
