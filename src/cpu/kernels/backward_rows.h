#pragma once

#include <cstdint>

#include "cpu/kernels/magnitude.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/row_factors.h"
#include "cpu/kernels/scratch.h"
#include "cpu/task.h"

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// The rows of a tile that the backward reads: q and dout as factors of its products, lse and delta.
template <class In, class Element>
struct BackwardRows {
  // The bits of 2^64. A larger delta is above the product of dout and v of its tile: some other v is large.
  static constexpr std::int32_t largest_delta = (127 + 64) << 23;
  using Storage = typename In::Storage;

  const BackwardTask& t;
  const Shape<Element>& shape;   // of q
  const Shape<Element>& values;  // of dout
  RowFactors<Element> q, dout;
  float *lse, *lse_low;       // [padded_rows]
  float* delta;               // [padded_rows]: dout . out - dlse
  std::int32_t* q_exponents;  // [padded_rows]; of q.row_major where it is large
  Storage* staged;            // [padded_rows or block_keys, head_dim]
  bool large = false;         // q, dout or delta

  BackwardRows(const BackwardTask& task, const Shape<Element>& query_shape,
               const Shape<Element>& value_shape, Storage* staged_storage,
               ScratchAllocator& allocator)
      : t(task), shape(query_shape), values(value_shape), staged(staged_storage) {
    q.take(shape, allocator);
    dout.take(values, allocator);
    lse = allocator.take<float>(shape.padded_rows);
    lse_low = allocator.take<float>(shape.padded_rows);
    delta = allocator.take<float>(shape.padded_rows);
    q_exponents = allocator.take<std::int32_t>(shape.padded_rows);
  }

  std::int64_t index(const Tile& tile, int r) const {
    const std::int64_t head = tile.head * t.group + r % t.group;
    return (tile.batch * t.heads_kv * t.group + head) * t.seqlen_q + tile.first_query + r / t.group;
  }

  void load_tile(const Tile& tile) {
    const auto dout_rows = tile_rows<In>(t, t.dout, tile);
    const auto out_rows = tile_rows<In>(t, t.out, tile);
    const auto q_rows = tile_rows<In>(t, t.q, tile);
    q.template pack<In>(shape, q_rows, tile.rows);
    if (q.large) {
      for (int r = tile.rows; r < shape.padded_rows; ++r) q_exponents[r] = 0;
      stage_rows<In>(q_rows, tile.rows, t.head_dim, NonFiniteInput::keep, staged, q_exponents);
      q.template pack_row_major<In>(shape, staged_rows(staged, t.head_dim), tile.rows);
    }
    for (int r = 0; r < shape.padded_rows; ++r) {
      // A row without keys, or past the end, has p = exp(s - inf) = 0.
      const float row_lse = r < tile.rows ? t.lse[index(tile, r)] : -infinity;
      lse[r] = row_lse == -infinity ? infinity : row_lse;
      lse_low[r] = r < tile.rows && t.lse_low != nullptr ? t.lse_low[index(tile, r)] : 0.0f;
    }
    load_dout(dout_rows, out_rows, tile.rows);
    if (large && t.saturate) {
      drop_nonfinite<In>(dout_rows, tile.rows, t.value_dim, staged);
      load_dout(staged_rows(staged, t.value_dim), out_rows, tile.rows);
    }
    if (t.dlse != nullptr) subtract_dlse(tile);
    large = large || q.large;
  }

  // The gradient of a row's lse. If gradients saturate, one that is not finite counts as 0, like such an element of dout.
  float dlse(const Tile& tile, int r) const {
    if (t.dlse == nullptr) return 0.0f;
    const float value = t.dlse[index(tile, r)];
    return t.saturate && !(value - value == 0.0f) ? 0.0f : value;
  }

 private:
  template <class DoutRow, class OutRow>
  void load_dout(const DoutRow& dout_row, const OutRow& out_row, int rows) {
    dout.template pack<In>(values, dout_row, rows);
    large = dout.large;
    for (int r = 0; r < rows; r += lanes) load_deltas(r, rows, dout_row, out_row);
    for (int r = rows; r < shape.padded_rows; ++r) delta[r] = 0;
  }

  // dout . out of `lanes` rows, a row per lane, summed in the order of a product in fp32: where a query
  // sees one key, out = v, and dp - delta is exactly 0.
  template <class DoutRow, class OutRow>
  void load_deltas(int row, int rows, const DoutRow& dout_row, const OutRow& out_row) {
    const int count = rows - row < lanes ? rows - row : lanes;
    Vec sums{};
    for (int d = 0; d < t.value_dim; d += lanes) {
      Vec elements[lanes] = {}, factors[lanes] = {};
      for (int i = 0; i < count; ++i) {
        elements[i] = load_widened<In>(dout_row(row + i) + d, t.value_dim - d);
        factors[i] = load_widened<In>(out_row(row + i) + d, t.value_dim - d);
      }
      transpose(elements);
      transpose(factors);
      for (int i = 0; i < lanes; ++i) sums = fma(elements[i], factors[i], sums);
    }
    for (int i = 0; i < count; ++i) delta[row + i] = sums[i];
    large = large || any((bits(sums) & 0x7fffffff) > largest_delta);
  }

  void subtract_dlse(const Tile& tile) {
    for (int r = 0; r < tile.rows; ++r) {
      delta[r] -= dlse(tile, r);
      // One row at a time, because padded_rows is no multiple of the lanes.
      large = large || any((bits(splat(delta[r])) & 0x7fffffff) > largest_delta);
    }
  }
};

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
