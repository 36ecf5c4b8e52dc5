#pragma once

#include <immintrin.h>

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

inline constexpr int lanes = 16;
// 12 x 2 accumulators, 2 vectors of b and 1 of a take 27 of 32 registers. Two columns of vectors, not four,
// keep a panel of b (16 KiB at head_dim 128) in the first-level cache.
inline constexpr int vector_strip_rows = 12;

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA

#include "cpu/kernels/vector.h"

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

// max and min return b where either operand is NaN.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }

// Loads the first `count` bytes, followed by zeros; no other byte is read.
template <class T>
T load_bytes(const void* p, int count) {
  const __mmask64 mask = ~std::uint64_t{0} >> (64 - count);
  const __m512i v = _mm512_maskz_loadu_epi8(mask, p);
  if constexpr (sizeof(T) == sizeof v) {
    return reinterpret_cast<T>(v);
  } else {
    return reinterpret_cast<T>(_mm512_castsi512_si256(v));
  }
}
template <class T>
void store_bytes(void* p, T v, int count) {
  const __mmask64 mask = ~std::uint64_t{0} >> (64 - count);
  if constexpr (sizeof(T) == sizeof(__m512i)) {
    _mm512_mask_storeu_epi8(p, mask, reinterpret_cast<__m512i>(v));
  } else {
    _mm512_mask_storeu_epi8(p, mask, _mm512_castsi256_si512(reinterpret_cast<__m256i>(v)));
  }
}

inline Vec from_bf16(Half v) {
  return from_bits(reinterpret_cast<Int>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(v)))
                   << 16);
}

inline Vec from_f16(Half v) { return _mm512_cvtph_ps(reinterpret_cast<__m256i>(v)); }
inline Half to_f16(Vec v) {
  return reinterpret_cast<Half>(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
