#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "flash_dmattn/attention.h"

// The checks of all arguments, before anything is written. Each throws InvalidArgument.
namespace flash_dmattn {

// Afterwards no product of dimensions that a tensor or a workspace is made of overflows.
void validate(const Problem& problem);

// Returns the visibility of a validated problem as backends see it: intervals have stride 0 wherever
// their size is 1, and no stride is dense_stride.
Visibility validated(const Problem& problem, const Visibility& visibility);

// Check all arguments of a call, whose problem has been validated, and return them as backends see them.
ForwardArgs validated(const ForwardArgs& args);
BackwardArgs validated(const BackwardArgs& args);

// check_input throws InvalidArgument unless a tensor of this shape has data and contiguous rows within the limits.
// check_output also throws if two elements overlap.
void check_input(std::string_view argument, const ConstTensor4& tensor,
                 const std::array<std::int64_t, 4>& shape);
void check_output(std::string_view argument, const Tensor4& tensor,
                  const std::array<std::int64_t, 4>& shape);

// ---- Shapes ----

template <std::size_t Size>
bool has_elements(const std::array<std::int64_t, Size>& shape) {
  return std::find(shape.begin(), shape.end(), 0) == shape.end();
}

// All zero if there is no tensor.
template <std::size_t Size>
bool is_given(const std::array<std::int64_t, Size>& shape) {
  return shape != std::array<std::int64_t, Size>{};
}

template <std::size_t Size>
std::string shape_text(const std::array<std::int64_t, Size>& values) {
  std::string result = "(";
  for (std::size_t i = 0; i < Size; ++i) {
    result += (i > 0 ? ", " : "") + std::to_string(values[i]);
  }
  return result + ")";
}

}  // namespace flash_dmattn
