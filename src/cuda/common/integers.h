#pragma once

#include <type_traits>

// A division that rounds up, of numbers that are not negative. On the device as well: constexpr functions are
// compiled for both.
namespace flash_dmattn::cuda {

template <class T>
constexpr T ceil_div(T a, std::type_identity_t<T> b) {
  return (a + b - 1) / b;
}

}  // namespace flash_dmattn::cuda
