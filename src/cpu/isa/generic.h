#pragma once

// The baseline of the target: 16-byte vectors (SSE2, NEON) in portable C++, without intrinsics.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

inline constexpr int lanes = 4;
// 6 x 2 accumulators, 2 vectors of b and 1 of a take 15 of the 16 registers of SSE2.
inline constexpr int vector_strip_rows = 6;

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA

#include "cpu/kernels/vector.h"

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

inline Vec fma(Vec a, Vec b, Vec c) {
#ifdef __FP_FAST_FMAF
  Vec result;
  for (int i = 0; i < lanes; ++i) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return result;
#else
  return a * b + c;  // SSE2 has no fused form
#endif
}

// max and min return b where either operand is NaN.
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }

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

inline Vec from_bf16(Half v) { return from_bits(__builtin_convertvector(v, Int) << 16); }

// The exponents of f16 are 112 below those of f32. A multiplication by 2^112 corrects this, also for
// subnormal numbers.
inline Vec from_f16(Half v) {
  const Int wide = __builtin_convertvector(v, Int);
  const Int magnitude = (wide & 0x7fff) << 13;
  const Int finite = bits(from_bits(magnitude) * 0x1p112f);
  const Int result = magnitude < (0x1f << 23) ? finite : magnitude | 0x7f800000;
  return from_bits(result | ((wide & 0x8000) << 16));
}

// Rounds to nearest even; NaN stays NaN, overflow becomes inf.
inline Half to_f16(Vec v) {
  const Int sign = (bits(v) >> 16) & 0x8000;
  const Int magnitude = bits(v) & 0x7fffffff;
  const Int normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112 << 23)) >> 13;
  // Below 2^-14 the sum with 0.5 rounds to a multiple of 2^-24.
  const Int subnormal = bits(from_bits(magnitude) + 0.5f) - 0x3f000000;
  Int result = magnitude < 0x38800000 ? subnormal : normal;
  result = magnitude >= 0x477ff000 ? Int{} + 0x7c00 : result;
  result = magnitude > 0x7f800000 ? Int{} + 0x7e00 : result;
  return __builtin_convertvector(result | sign, Half);
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
