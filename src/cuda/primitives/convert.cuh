#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "flash_dmattn/types.h"

// Conversions between fp32 and the 16-bit dtypes, with the saturation of attention.h. A packed2 is two elements in a
// 32-bit word.
namespace flash_dmattn::cuda {

template <class T>
struct Element;

template <>
struct Element<__nv_bfloat16> {
  using Packed2 = __nv_bfloat162;
  static constexpr DType dtype = DType::bf16;
  static constexpr std::uint32_t max_packed2 = 0x7f7f7f7fu;             // 3.39e38, twice
  static constexpr std::uint32_t gradient_limit_packed2 = 0x7eff7effu;  // 1.69e38, twice
  static constexpr std::uint32_t exponent_mask = 0x7f80u;
  static __device__ Packed2 pack(float x, float y) { return __floats2bfloat162_rn(x, y); }
  static __device__ __nv_bfloat16 round_down(float x) { return __float2bfloat16_rd(x); }
  static __device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ float2 widen_packed2(std::uint32_t bits) {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
};

template <>
struct Element<__half> {
  using Packed2 = __half2;
  static constexpr DType dtype = DType::f16;
  static constexpr std::uint32_t max_packed2 = 0x7bff7bffu;  // 65504, twice
  static constexpr std::uint32_t gradient_limit_packed2 = 0x7bff7bffu;
  static constexpr std::uint32_t exponent_mask = 0x7c00u;
  static __device__ Packed2 pack(float x, float y) { return __floats2half2_rn(x, y); }
  static __device__ __half round_down(float x) { return __float2half_rd(x); }
  static __device__ float widen(__half x) { return __half2float(x); }
  static __device__ float2 widen_packed2(std::uint32_t bits) {
    return __half22float2(reinterpret_cast<const Packed2&>(bits));
  }
};

template <class T>
__device__ inline std::uint32_t pack(float x, float y) {
  const auto packed = Element<T>::pack(x, y);
  return reinterpret_cast<const std::uint32_t&>(packed);
}

// Limits both elements to +-limit. A NaN becomes the positive limit, because min returns the other operand.
template <class T>
__device__ inline std::uint32_t clamp_packed2(std::uint32_t bits, std::uint32_t limit) {
  using Packed2 = typename Element<T>::Packed2;
  const std::uint32_t negative = limit | 0x80008000u;
  const Packed2 upper = reinterpret_cast<const Packed2&>(limit);
  const Packed2 lower = reinterpret_cast<const Packed2&>(negative);
  const Packed2 clamped = __hmax2(__hmin2(reinterpret_cast<const Packed2&>(bits), upper), lower);
  return reinterpret_cast<const std::uint32_t&>(clamped);
}

// Clamps both elements to [0, 1]; a NaN becomes 0.
template <class T>
__device__ inline std::uint32_t saturate_packed2(std::uint32_t bits) {
  using Packed2 = typename Element<T>::Packed2;
  const Packed2 saturated =
      __hmin2(__hmax2(reinterpret_cast<const Packed2&>(bits), Element<T>::pack(0, 0)),
              Element<T>::pack(1, 1));
  return reinterpret_cast<const std::uint32_t&>(saturated);
}

// Whether one of two packed elements has a magnitude of 2 or more, or is negative or a NaN. `bits` may be the bitwise
// or of several packed2.
__device__ inline bool exceeds_probability(std::uint32_t bits) { return (bits & 0xc000c000u) != 0; }

// A running check whose sum stays finite (is_finite_packed2) only if no element exceeds the limit of pack_gradient. In
// bf16 it adds squares, which overflow at 1.8e19 instead of 1.69e38. In f16 the limit is the largest number.
template <class T>
__device__ inline std::uint32_t add_magnitude(std::uint32_t sum, std::uint32_t elements) {
  using Packed2 = typename Element<T>::Packed2;
  const Packed2 x = reinterpret_cast<const Packed2&>(elements);
  const Packed2 y = Element<T>::dtype == DType::bf16 ? x : Element<T>::pack(0, 0);
  const Packed2 result = __hfma2(x, y, reinterpret_cast<const Packed2&>(sum));
  return reinterpret_cast<const std::uint32_t&>(result);
}

template <class T>
__device__ inline std::uint32_t add_packed2(std::uint32_t x, std::uint32_t y) {
  using Packed2 = typename Element<T>::Packed2;
  const Packed2 sum =
      __hadd2(reinterpret_cast<const Packed2&>(x), reinterpret_cast<const Packed2&>(y));
  return reinterpret_cast<const std::uint32_t&>(sum);
}

template <class T>
__device__ inline bool is_finite_packed2(std::uint32_t bits) {
  constexpr std::uint32_t exponent = Element<T>::exponent_mask;
  return (bits & exponent) != exponent && (bits >> 16 & exponent) != exponent;
}

// Eight packed elements with inf and NaN replaced by 0.
template <class T>
__device__ inline uint4 clear_non_finite_packed8(const uint4& words) {
  const auto clear_packed2 = [](std::uint32_t bits) {
    constexpr std::uint32_t exponent = Element<T>::exponent_mask;
    if ((bits & exponent) == exponent) bits &= 0xffff0000u;
    if ((bits >> 16 & exponent) == exponent) bits &= 0x0000ffffu;
    return bits;
  };
  return {clear_packed2(words.x), clear_packed2(words.y), clear_packed2(words.z),
          clear_packed2(words.w)};
}

// Packs a gradient, or ds before it is multiplied.
template <class T>
__device__ inline std::uint32_t pack_gradient(float x, float y, bool saturate) {
  const std::uint32_t bits = pack<T>(x, y);
  return saturate ? clamp_packed2<T>(bits, Element<T>::gradient_limit_packed2) : bits;
}

// The sum of two gradients, packed.
template <class T>
__device__ inline std::uint32_t add_gradients_packed2(std::uint32_t x, std::uint32_t y,
                                                      bool saturate) {
  const std::uint32_t bits = add_packed2<T>(x, y);
  return saturate ? clamp_packed2<T>(bits, Element<T>::gradient_limit_packed2) : bits;
}

template <class T>
__device__ inline std::uint32_t pack_output(float x, float y, bool saturate) {
  const std::uint32_t bits = pack<T>(x, y);
  return saturate ? clamp_packed2<T>(bits, Element<T>::max_packed2) : bits;
}

}  // namespace flash_dmattn::cuda
