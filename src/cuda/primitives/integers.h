#pragma once

#include <type_traits>

// Division of nonnegative numbers that rounds up. It is available on the device, because constexpr functions are
// compiled for both sides.
namespace flash_dmattn::cuda {

template <class T>
constexpr T ceil_div(T a, std::type_identity_t<T> b) {
  return (a + b - 1) / b;
}

}  // namespace flash_dmattn::cuda
