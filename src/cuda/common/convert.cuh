#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "flash_dmattn/types.h"

// Conversions between fp32 and the 16-bit dtypes, with the saturation that attention.h promises.
namespace flash_dmattn::cuda {

template <class T>
struct Element;

template <>
struct Element<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static constexpr DType dtype = DType::bf16;
  static constexpr std::uint32_t max_pair = 0x7f7f7f7fu;       // 3.39e38, twice
  static constexpr std::uint32_t gradient_pair = 0x7eff7effu;  // 1.69e38, twice
  static constexpr std::uint32_t exponent_mask = 0x7f80u;
  static __device__ Pair pack(float x, float y) { return __floats2bfloat162_rn(x, y); }
  static __device__ __nv_bfloat16 round_down(float x) { return __float2bfloat16_rd(x); }
  static __device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ float2 widen_pair(std::uint32_t bits) {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
};

template <>
struct Element<__half> {
  using Pair = __half2;
  static constexpr DType dtype = DType::f16;
  static constexpr std::uint32_t max_pair = 0x7bff7bffu;  // 65504, twice
  static constexpr std::uint32_t gradient_pair = 0x7bff7bffu;
  static constexpr std::uint32_t exponent_mask = 0x7c00u;
  static __device__ Pair pack(float x, float y) { return __floats2half2_rn(x, y); }
  static __device__ __half round_down(float x) { return __float2half_rd(x); }
  static __device__ float widen(__half x) { return __half2float(x); }
  static __device__ float2 widen_pair(std::uint32_t bits) {
    return __half22float2(reinterpret_cast<const Pair&>(bits));
  }
};

template <class T>
__device__ inline std::uint32_t pack(float x, float y) {
  auto pair = Element<T>::pack(x, y);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

// Limits both halves to +-limit; a NaN becomes the positive limit, as min returns its other
// operand.
template <class T>
__device__ inline std::uint32_t clamp_pair(std::uint32_t bits, std::uint32_t limit) {
  using Pair = typename Element<T>::Pair;
  const std::uint32_t negative = limit | 0x80008000u;
  const Pair upper = reinterpret_cast<const Pair&>(limit);
  const Pair lower = reinterpret_cast<const Pair&>(negative);
  const Pair clamped = __hmax2(__hmin2(reinterpret_cast<const Pair&>(bits), upper), lower);
  return reinterpret_cast<const std::uint32_t&>(clamped);
}

// Both halves to [0, 1]; a NaN becomes 0.
template <class T>
__device__ inline std::uint32_t saturate_pair(std::uint32_t bits) {
  using Pair = typename Element<T>::Pair;
  const Pair saturated = __hmin2(
      __hmax2(reinterpret_cast<const Pair&>(bits), Element<T>::pack(0, 0)), Element<T>::pack(1, 1));
  return reinterpret_cast<const std::uint32_t&>(saturated);
}

// Whether a half has a magnitude of 2 or more, or is negative or a NaN. Of the bits of many pairs,
// whether one of them has.
__device__ inline bool exceeds_probability(std::uint32_t bits) { return (bits & 0xc000c000u) != 0; }

// A sum that is_finite_pair as long as no half has a magnitude that pack_gradient limits: squares in
// bf16, which ends at 1.8e19 instead of 1.69e38; in f16 the largest number is the limit.
template <class T>
__device__ inline std::uint32_t add_magnitude(std::uint32_t sum, std::uint32_t pair) {
  using Pair = typename Element<T>::Pair;
  const Pair x = reinterpret_cast<const Pair&>(pair);
  const Pair y = Element<T>::dtype == DType::bf16 ? x : Element<T>::pack(0, 0);
  const Pair result = __hfma2(x, y, reinterpret_cast<const Pair&>(sum));
  return reinterpret_cast<const std::uint32_t&>(result);
}

template <class T>
__device__ inline bool is_finite_pair(std::uint32_t bits) {
  constexpr std::uint32_t exponent = Element<T>::exponent_mask;
  return (bits & exponent) != exponent && (bits >> 16 & exponent) != exponent;
}

// A gradient, or ds before it is multiplied.
template <class T>
__device__ inline std::uint32_t pack_gradient(float x, float y, bool saturate) {
  const std::uint32_t bits = pack<T>(x, y);
  return saturate ? clamp_pair<T>(bits, Element<T>::gradient_pair) : bits;
}

template <class T>
__device__ inline std::uint32_t pack_output(float x, float y, bool saturate) {
  const std::uint32_t bits = pack<T>(x, y);
  return saturate ? clamp_pair<T>(bits, Element<T>::max_pair) : bits;
}

}  // namespace flash_dmattn::cuda
