#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "flash_dmattn/types.h"

// Scalar bf16 and f16 conversions and typed element access, for code outside the kernels.
namespace flash_dmattn {

inline float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// Round to nearest even; NaN stays a quiet NaN, overflow becomes inf.
inline std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// Round to nearest even; NaN stays a quiet NaN, overflow becomes inf.
inline std::uint16_t float_to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // >= 65520
  if (magnitude < 0x38800000u) {  // below 2^-14: the sum with 0.5 rounds to a multiple of 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23);
  return static_cast<std::uint16_t>(sign | (rounded >> 13));
}

// Element `index` of an array of `dtype`, as double.
inline double load(const void* data, DType dtype, std::int64_t index) {
  const char* bytes = static_cast<const char*>(data) + index * size_of(dtype);
  const auto read = [&]<class T>(T value) {
    std::memcpy(&value, bytes, sizeof value);
    return value;
  };
  switch (dtype) {
    case DType::f64: return read(double{});
    case DType::f32: return static_cast<double>(read(float{}));
    case DType::bf16: return static_cast<double>(bf16_to_float(read(std::uint16_t{})));
    default: return static_cast<double>(f16_to_float(read(std::uint16_t{})));
  }
}

// Rounds `value` to `dtype` and writes it as element `index`; overflow becomes inf.
inline void store(void* data, DType dtype, std::int64_t index, double value) {
  char* bytes = static_cast<char*>(data) + index * size_of(dtype);
  const auto write = [&](auto element) { std::memcpy(bytes, &element, sizeof element); };
  switch (dtype) {
    case DType::f64: return write(value);
    case DType::f32: return write(static_cast<float>(value));
    case DType::bf16: return write(float_to_bf16(static_cast<float>(value)));
    default: return write(float_to_f16(static_cast<float>(value)));
  }
}

}  // namespace flash_dmattn
