#pragma once

#include <cmath>
#include <limits>

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
FLASH_DMATTN_ANY_DEVICE inline float softplus(float z) {
  return (z > 0 ? z : 0.0f) + std::log1p(std::exp(z > 0 ? -z : z));
}

FLASH_DMATTN_ANY_DEVICE inline float score_of(ScoreForm form, float z, float factor) {
  if (form == ScoreForm::projection) return z;
  if (form == ScoreForm::gelu) return z * (0.5f * (1.0f + std::erf(z * 0.70710678f)));
  if (form == ScoreForm::gate) return -softplus(-z);
  constexpr float largest = std::numeric_limits<float>::max();
  // Half a unit below the logarithm of `largest`, because exp of the exact one may round to infinity.
  constexpr float largest_exponent = 88.7228317f;
  const float z_plus = softplus(z);
  const float exponent = factor * (z_plus > largest ? largest : z_plus);  // 0 * inf would be NaN
  if (form == ScoreForm::linear) return exponent;
  return std::exp(exponent > largest_exponent ? largest_exponent : exponent);
}

}  // namespace flash_dmattn

#undef FLASH_DMATTN_ANY_DEVICE
