#pragma once

#include <cstdint>

#include "cpu/magnitude.h"
#include "cpu/multiply.h"
#include "cpu/pack.h"
#include "cpu/scratch.h"
#include "cpu/task.h"

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// Rows of q or dout of a tile in the two layouts that products need.
template <class Element, class In>
struct RowFactors {
  Factor row_major;  // a of s = q k^T and dp = dout v^T
  Panels panels;     // b of dk = ds^T q and dv = p^T dout
  typename In::Storage* staged;
  std::int32_t* exponents;  // rows were packed times 2^-exponent
  bool large = false;       // some exponent is not 0
  bool nonfinite = false;   // the panels have zeros for elements that are not finite

  void take(const Shape<Element>& shape, const Task& t, Arena& arena) {
    row_major = shape.take_row_major(arena);
    panels = shape.take_row_panels(arena);
    staged = arena.take<typename In::Storage>(std::int64_t{shape.padded_rows} * t.head_dim);
    exponents = arena.take<std::int32_t>(shape.padded_rows);
  }

  template <class RowAt>
  void pack(const Shape<Element>& shape, const Task& t, const RowAt& row, int rows,
            NonFiniteInput inputs) {
    for (int r = 0; r < shape.padded_rows; ++r) exponents[r] = 0;
    large = nonfinite = false;
    if (!is_large(pack_row_major(shape, t, row, rows))) {
      pack_panels<In, Element>(row, rows, shape.padded_rows, t.head_dim, panels);
      return;
    }
    const auto from = staged_rows(staged, t.head_dim);
    large = stage_rows<In>(row, rows, t.head_dim, inputs, staged, exponents) > 0;
    nonfinite = is_nonfinite(pack_row_major(shape, t, from, rows));
    if (nonfinite) stage_rows<In>(row, rows, t.head_dim, NonFiniteInput::drop, staged, exponents);
    pack_panels<In, Element>(from, rows, shape.padded_rows, t.head_dim, panels);
  }

 private:
  template <class RowAt>
  Int pack_row_major(const Shape<Element>& shape, const Task& t, const RowAt& row, int rows) {
    return pack_rows<In, Element>(row, rows, shape.padded_rows, t.head_dim,
                                  const_cast<float*>(row_major.words), shape.head_ld);
  }
};

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
