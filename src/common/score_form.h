#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "flash_dmattn/scores.h"

#ifdef __CUDACC__
#define FLASH_DMATTN_ANY_DEVICE __host__ __device__
#else
#define FLASH_DMATTN_ANY_DEVICE
#endif

// The functions of ScoreForm. Their bits depend on the arguments alone. Code for one instruction set must not include this
// header: its copies of these functions could replace those of the others.
namespace flash_dmattn {

// log(1 + exp(z)); NaN for NaN.
template <class T>
FLASH_DMATTN_ANY_DEVICE inline T softplus(T z) {
  return (z > 0 ? z : T{0}) + std::log1p(std::exp(z > 0 ? -z : z));
}

template <class T>
FLASH_DMATTN_ANY_DEVICE inline T score_of(ScoreForm form, T z, T factor) {
  if (form == ScoreForm::projection) return z;
  if (form == ScoreForm::gelu) return z * (T(0.5) * (1 + std::erf(z * T(0.7071067811865476))));
  if (form == ScoreForm::gate) return -softplus(-z);
  constexpr T largest = std::numeric_limits<T>::max();
  // The logarithm of `largest` minus half a unit, because exp of the exact one may round to infinity.
  constexpr T largest_exponent =
      std::is_same_v<T, float> ? T(88.72283172607422) : T(709.7827128933839);
  const T z_plus = softplus(z);
  const T exponent = factor * (z_plus > largest ? largest : z_plus);  // 0 * inf would be NaN
  if (form == ScoreForm::linear) return exponent;
  return std::exp(exponent > largest_exponent ? largest_exponent : exponent);
}

}  // namespace flash_dmattn

#undef FLASH_DMATTN_ANY_DEVICE
