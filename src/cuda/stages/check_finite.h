#pragma once

#include <array>
#include <cstdint>

#include "flash_dmattn/execution.h"
#include "flash_dmattn/types.h"

// Check mode in device memory.
namespace flash_dmattn::cuda {

struct NonFiniteElement {
  std::int64_t index = -1;  // index in row-major order, without strides; -1 if there is none
  double value = 0;
};

// Returns the first element that is inf or NaN; with `minus_inf`, -inf counts as finite. Waits for the device and
// allocates 8 bytes there. Throws std::runtime_error while the stream is being captured.
NonFiniteElement first_nonfinite(const ConstTensor4& tensor,
                                 const std::array<std::int64_t, 4>& shape, DType dtype,
                                 bool minus_inf, const Execution& execution);

}  // namespace flash_dmattn::cuda
