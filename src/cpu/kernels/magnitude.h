#pragma once

#include <cstdint>

#include "cpu/kernels/element.h"
#include "cpu/kernels/pack.h"

// Sorts tiles and blocks by their largest element. Products of ordinary elements stay inside fp32: q . k and dout . v
// are below 2^(40 + 40 + 8). Large elements may overflow, so that scores and dp are limited to finite numbers.
// Elements that are inf or NaN are zeros in the factors of sums over keys or rows, because a masked element
// contributes 0 and 0 * inf is NaN.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

enum class Numbers : std::int32_t { ordinary, large, nonfinite };

inline Numbers larger(Numbers a, Numbers b) { return a > b ? a : b; }

// The class of rows with these magnitudes (pack.h).
inline Numbers numbers_of(Int magnitude) {
  if (any(magnitude >= (0xff << 23))) return Numbers::nonfinite;
  return any(magnitude > ((127 + 40) << 23)) ? Numbers::large : Numbers::ordinary;
}

// Packs the b of a sum over keys or rows, without inf and NaN.
template <class In, class Element, class RowAt>
Numbers pack_finite_panels(const RowAt& row, int rows, int padded_rows, int head_dim, Panels to) {
  const Numbers numbers =
      numbers_of(pack_panels<In, Element>(row, rows, padded_rows, head_dim, to));
  if (numbers == Numbers::nonfinite) {
    pack_panels<In, Element, NonFiniteElements::drop>(row, rows, padded_rows, head_dim, to);
  }
  return numbers;
}

// c(r)[d] += sum_k a(r, k) b[k][d] over the non-finite elements of b where counts(r, k) is true.
template <class In, class A, class Counts, class RowAt, class SumsAt>
void add_nonfinite(const A& a, const Counts& counts, const RowAt& b, int rows, int depth,
                   int head_dim, const SumsAt& c) {
  for (int k = 0; k < depth; ++k) {
    for (int d = 0; d < head_dim; ++d) {
      const float element = load_scalar<In>(b(k), d);
      if (element - element == 0) continue;
      for (int r = 0; r < rows; ++r) {
        if (counts(r, k)) c(r)[d] += a(r, k) * element;
      }
    }
  }
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
