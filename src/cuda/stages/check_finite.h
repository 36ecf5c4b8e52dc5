#pragma once

#include <array>
#include <cstdint>

#include "backend.h"

// Check mode in device memory.
namespace flash_dmattn::cuda {

// Returns the first element that is inf or NaN; with `minus_inf`, -inf counts as finite. Waits for the device and
// allocates 8 bytes there. Throws std::runtime_error while the stream is being captured.
NonFiniteElement first_nonfinite(const ConstTensor4& tensor,
                                 const std::array<std::int64_t, 4>& shape, DType dtype,
                                 bool minus_inf, const Execution& execution);

}  // namespace flash_dmattn::cuda
