#pragma once

#include <cstdint>

#include "cpu/kernels/element.h"
#include "cpu/kernels/multiply.h"

// Keeps products of large numbers in range. Elements up to 2^28 need no scaling: the longest chain,
// dk = sum (dout . v) q, stays below 2^(28 + 28 + 8 + 28 + 31). A larger element, an inf or a NaN sends
// its tile or block to the slow path. For scores and out, rows are packed times a power of two that brings
// their largest element below 2^28, and the factors are undone where the sums stay in range. The backward
// sums in double there (large_block.h).
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

inline constexpr int safe_exponent = 28;
// Where v is large, out is summed in units of 2^sum_unit.
inline constexpr int sum_unit = 40;

inline Vec finite_or_zero(Vec v) { return (bits(v) & 0x7fffffff) < 0x7f800000 ? v : Vec{}; }
inline bool is_large(Int magnitude) { return any(magnitude > ((127 + safe_exponent) << 23)); }

// 2^exponent for |exponent| <= 126.
inline float power_of_two(int exponent) { return from_bits(Int{} + ((127 + exponent) << 23))[0]; }

// v * 2^exponent, even where 2^exponent is out of range.
inline float scaled(float v, int exponent) {
  while (exponent > 126) {
    v *= power_of_two(126);
    exponent -= 126;
  }
  while (exponent < -126) {
    v *= power_of_two(-126);
    exponent += 126;
  }
  return v * power_of_two(exponent);
}

// v[i] * 2^(exponents[i] - shift). The function is rare and not inlined, because it would spill the registers
// of the surrounding loops.
[[gnu::noinline]] inline Vec scaled(Vec v, const std::int32_t* exponents, int shift) {
  for (int i = 0; i < lanes; ++i) v[i] = scaled(v[i], exponents[i] - shift);
  return v;
}

enum class NonFiniteInput : std::uint8_t { keep, drop };

// Writes rows times 2^-exponent[r] as a dense [rows, head_dim] array, with exponents >= 0 that bring
// every finite element to 2^28 or below. `drop` turns inf and NaN into 0. Returns the largest exponent.
template <class In, class RowAt>
int stage_rows(const RowAt& row, int rows, int head_dim, NonFiniteInput nonfinite,
               typename In::Storage* to, std::int32_t* exponents) {
  int largest = 0;
  for (int r = 0; r < rows; ++r) {
    std::int32_t top = 0;
    for (int d = 0; d < head_dim; d += lanes) {
      const Int m = bits(load_widened<In>(row(r) + d, head_dim - d)) & 0x7fffffff;
      for (int i = 0; i < lanes; ++i) {
        if (m[i] < 0x7f800000 && m[i] > top) top = m[i];
      }
    }
    const int exponent = (top >> 23) - 127 + 1 - safe_exponent;
    exponents[r] = exponent > 0 ? exponent : 0;
    if (exponents[r] > largest) largest = exponents[r];
    const float factor = power_of_two(-exponents[r]);
    for (int d = 0; d < head_dim; d += lanes) {
      Vec v = load_widened<In>(row(r) + d, head_dim - d);
      if (nonfinite == NonFiniteInput::drop) {
        v = finite_or_zero(v);
      }
      store_narrowed<In>(to + std::int64_t{r} * head_dim + d, v * splat(factor), head_dim - d);
    }
  }
  return largest;
}

// Writes rows as a dense [rows, head_dim] array with 0 for inf and NaN.
template <class In, class RowAt>
void drop_nonfinite(const RowAt& row, int rows, int head_dim, typename In::Storage* to) {
  for (int r = 0; r < rows; ++r) {
    for (int d = 0; d < head_dim; d += lanes) {
      const Vec v = finite_or_zero(load_widened<In>(row(r) + d, head_dim - d));
      store_narrowed<In>(to + std::int64_t{r} * head_dim + d, v, head_dim - d);
    }
  }
}

// c[r] += sum_k a(r, k) b[k] over the non-finite elements of b where counts(r, k) is true. The product itself
// had zeros for these elements, since a masked element contributes 0 and 0 * inf is NaN.
template <class In, class A, class Counts, class RowAt>
void add_nonfinite(const A& a, const Counts& counts, const RowAt& b, int rows, int depth,
                   int head_dim, Product c) {
  for (int k = 0; k < depth; ++k) {
    for (int d = 0; d < head_dim; ++d) {
      const float element = load_scalar<In>(b(k), d);
      if (element - element == 0) continue;
      for (int r = 0; r < rows; ++r) {
        if (counts(r, k)) c.data[r * c.ld + d] += a(r, k) * element;
      }
    }
  }
}

inline void scale_by_power(float* data, std::int64_t count, int exponent) {
  for (std::int64_t i = 0; i < count; ++i) data[i] = scaled(data[i], exponent);
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
