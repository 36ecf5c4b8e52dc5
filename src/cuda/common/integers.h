#pragma once

#include <type_traits>

// Divisions that round up, of numbers that are not negative. On the device as well: constexpr functions
// are compiled for both.
namespace flash_dmattn::cuda {

template <class T>
constexpr T ceil_div(T a, std::type_identity_t<T> b) {
  return (a + b - 1) / b;
}

// To a multiple of b.
template <class T>
constexpr T round_up(T a, std::type_identity_t<T> b) {
  return ceil_div(a, b) * b;
}

}  // namespace flash_dmattn::cuda
