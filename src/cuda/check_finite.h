#pragma once

#include <array>
#include <cstdint>

#include "flash_dmattn/execution.h"
#include "flash_dmattn/types.h"

// Check mode in device memory.
namespace flash_dmattn::cuda {

struct NonFiniteElement {
  std::int64_t index =
      -1;  // in the order of the indices, counted without strides; -1: there is none
  double value = 0;
};

// The first element that is inf or NaN (or, with `minus_inf`, not -inf either). Waits for the device,
// and allocates 8 bytes there; std::runtime_error while the stream is being captured.
NonFiniteElement first_nonfinite(const ConstTensor4& tensor,
                                 const std::array<std::int64_t, 4>& shape, DType dtype,
                                 bool minus_inf, const Execution& execution);

}  // namespace flash_dmattn::cuda
