#pragma once

#include <array>
#include <cstdint>

#include "flash_dmattn/types.h"

// A pass over the elements of a tensor with any strides, one at a time.
namespace flash_dmattn::cpu {

// Does nothing if the tensor has no data.
void store_zeros(const Tensor4& tensor, DType dtype, const std::array<std::int64_t, 4>& shape);

}  // namespace flash_dmattn::cpu
