#pragma once

#include <cstdint>

#include "cpu/kernels/magnitude.h"
#include "cpu/kernels/multiply.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/scratch.h"
#include "cpu/task.h"

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// The rows of q or dout of a tile in the two layouts that products need.
template <class Element>
struct RowFactors {
  Factor row_major;  // a of s = q k^T and dp = dout v^T
  Panels panels;     // b of dk = ds^T q and dv = p^T dout, without inf and NaN
  Numbers numbers = Numbers::ordinary;

  void take(const Shape<Element>& shape, ScratchAllocator& allocator) {
    row_major = shape.take_row_major(allocator);
    panels = shape.take_row_panels(allocator);
  }

  template <class In, NonFiniteElements nonfinite = NonFiniteElements::keep, class RowAt>
  void pack(const Shape<Element>& shape, const RowAt& row, int rows) {
    numbers = numbers_of(
        pack_rows<In, Element, nonfinite>(row, rows, shape.padded_rows, shape.head_dim,
                                          const_cast<float*>(row_major.words), shape.head_ld));
    pack_finite_panels<In, Element>(row, rows, shape.padded_rows, shape.head_dim, panels);
  }
};

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
