#pragma once

#include <cstdint>

#include "cpu/kernels/magnitude.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/row_factors.h"
#include "cpu/kernels/scratch.h"
#include "cpu/task.h"

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// A dp or delta whose difference stays inside fp32 and bf16; NaN becomes the upper limit.
inline Vec limited_gradient(Vec v) { return saturated(v, 0x1p126f); }

// The rows of a tile that the backward reads: q and dout as factors of its products, lse and delta.
template <class In, class Element>
struct BackwardRows {
  const BackwardTask& t;
  const Shape<Element>& shape;   // of q
  const Shape<Element>& values;  // of dout
  RowFactors<Element> q, dout;
  float *lse, *lse_low;                 // [padded_rows]
  float* delta;                         // [padded_rows]: dout . out - dlse
  Numbers numbers = Numbers::ordinary;  // of q, dout, lse and delta

  BackwardRows(const BackwardTask& task, const Shape<Element>& query_shape,
               const Shape<Element>& value_shape, ScratchAllocator& allocator)
      : t(task), shape(query_shape), values(value_shape) {
    q.take(shape, allocator);
    dout.take(values, allocator);
    lse = allocator.take<float>(shape.padded_rows);
    lse_low = allocator.take<float>(shape.padded_rows);
    delta = allocator.take<float>(shape.padded_rows);
  }

  std::int64_t index(const Tile& tile, int r) const {
    const std::int64_t head = tile.head * t.group + r % t.group;
    return (tile.batch * t.heads_kv * t.group + head) * t.seqlen_q + tile.first_query + r / t.group;
  }

  void load_tile(const Tile& tile) {
    q.template pack<In>(shape, tile_rows<In>(t, t.q, tile), tile.rows);
    const auto dout_rows = tile_rows<In>(t, t.dout, tile);
    dout.template pack<In>(values, dout_rows, tile.rows);
    const bool drops = t.saturate && dout.numbers == Numbers::nonfinite;
    if (drops) {
      dout.template pack<In, NonFiniteElements::drop>(values, dout_rows, tile.rows);
    }
    numbers = larger(q.numbers, dout.numbers);
    for (int r = 0; r < shape.padded_rows; ++r) {
      // A row without keys, or past the end, has p = exp(s - inf) = 0.
      const float row_lse = r < tile.rows ? t.lse[index(tile, r)] : -infinity;
      if (row_lse != row_lse) numbers = Numbers::nonfinite;
      lse[r] = row_lse == -infinity ? infinity : row_lse;
      lse_low[r] = r < tile.rows && t.lse_low != nullptr ? t.lse_low[index(tile, r)] : 0.0f;
      delta[r] = 0;
    }
    const auto out_rows = tile_rows<In>(t, t.out, tile);
    for (int r = 0; r < tile.rows; r += lanes) {
      load_deltas(r, tile.rows, dout_rows, out_rows, drops);
    }
    for (int r = 0; r < tile.rows; ++r) {
      delta[r] -= dlse(tile, r);
      if (delta[r] - delta[r] != 0) numbers = Numbers::nonfinite;
      if (t.saturate) delta[r] = limited_gradient(splat(delta[r]))[0];
    }
  }

  // The gradient of a row's lse. If gradients saturate, one that is not finite counts as 0, like such an element of dout.
  float dlse(const Tile& tile, int r) const {
    if (t.dlse == nullptr) return 0.0f;
    const float value = t.dlse[index(tile, r)];
    return t.saturate && !(value - value == 0.0f) ? 0.0f : value;
  }

 private:
  // dout . out of `lanes` rows, a row per lane, summed in the order of a product in fp32: where a query
  // sees one key, out = v, and dp - delta is exactly 0.
  template <class DoutRow, class OutRow>
  void load_deltas(int row, int rows, const DoutRow& dout_row, const OutRow& out_row, bool drops) {
    const int count = rows - row < lanes ? rows - row : lanes;
    Vec sums{};
    for (int d = 0; d < t.value_dim; d += lanes) {
      Vec elements[lanes] = {}, factors[lanes] = {};
      for (int i = 0; i < count; ++i) {
        elements[i] = load_widened<In>(dout_row(row + i) + d, t.value_dim - d);
        if (drops) elements[i] = finite_or_zero(elements[i]);
        factors[i] = load_widened<In>(out_row(row + i) + d, t.value_dim - d);
      }
      transpose(elements);
      transpose(factors);
      for (int i = 0; i < lanes; ++i) sums = fma(elements[i], factors[i], sums);
    }
    for (int i = 0; i < count; ++i) delta[row + i] = sums[i];
  }
};

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
