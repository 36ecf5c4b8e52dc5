#pragma once

#include "cuda/attention/params.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/math.cuh"

// Loads masks and biases of scores.
namespace flash_dmattn::cuda {

// Loads element `index` of a bias, but not through the read-only cache: a decode step writes the score of its token,
// and a row that is recomputed reads it.
template <class T>
__device__ inline float load_bias(const Broadcast& bias, std::int64_t index) {
  if (bias.f32) return reinterpret_cast<const float*>(bias.data)[index];
  return Element<T>::widen(reinterpret_cast<const T*>(bias.data)[index]);
}

// The mask value of T, packed twice: a bias masks unless it is greater.
template <class T>
__device__ inline std::uint32_t packed_mask_value(const ScoreParams& score) {
  const T value = Element<T>::round_down(score.mask_value);
  return reinterpret_cast<const std::uint16_t&>(value) * 0x00010001u;
}

// Two packed biases, with -inf for a bias that masks (also NaN) or whose element of `shown` has no bits set.
template <class T>
__device__ inline std::uint32_t hide_masking_biases(std::uint32_t biases, std::uint32_t mask_values,
                                                    std::uint32_t shown = ~0u) {
  using Packed2 = typename Element<T>::Packed2;
  const std::uint32_t visible = shown & __hgt2_mask(reinterpret_cast<const Packed2&>(biases),
                                                    reinterpret_cast<const Packed2&>(mask_values));
  constexpr std::uint32_t infinities = (Element<T>::exponent_mask | 0x8000u) * 0x00010001u;
  return (biases & visible) | (infinities & ~visible);
}

}  // namespace flash_dmattn::cuda
