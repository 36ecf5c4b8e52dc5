#pragma once

#include <immintrin.h>

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

inline constexpr int lanes = 8;
// 6 x 2 accumulators, 2 vectors of b and 1 of a take 15 of 16 registers.
inline constexpr int vector_strip_rows = 6;

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA

#include "cpu/kernels/vector.h"

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

// max and min return b where either operand is NaN.
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }

template <class T>
T load_bytes(const void* p, int count) {
  T v{};
  __builtin_memcpy(&v, p, static_cast<unsigned>(count));
  return v;
}
template <class T>
void store_bytes(void* p, T v, int count) {
  __builtin_memcpy(p, &v, static_cast<unsigned>(count));
}

inline Vec from_bf16(Half v) {
  return from_bits(reinterpret_cast<Int>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(v)))
                   << 16);
}

inline Vec from_f16(Half v) { return _mm256_cvtph_ps(reinterpret_cast<__m128i>(v)); }
inline Half to_f16(Vec v) {
  return reinterpret_cast<Half>(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
