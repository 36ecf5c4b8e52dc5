#pragma once

#include <cstdint>

#include "cpu/kernels/keys.h"
#include "cpu/kernels/math.h"
#include "cpu/kernels/multiply.h"
#include "cpu/kernels/score.h"
#include "cpu/kernels/scratch.h"

// Computes blocks of the backward whose sums may leave fp32: ds alone reaches 2^265 when every input is near
// 2^128. The common path makes the scores, since p has to equal the forward's. All later steps are in
// double, element by element.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// The sums of a tile and a block in double, and the rows of the block in fp32.
struct LargeSums {
  double* dq;        // [padded_rows, head_columns], added to the sums in fp32
  double *dk, *dv;   // [block_keys, head_columns], dv with those of the values
  float *k, *v;      // the same
  double *q, *dout;  // [head_columns], the current row
  bool has_dq = false;

  template <class Shape>
  void take(const Shape& shape, const Shape& values, ScratchAllocator& allocator) {
    const std::int64_t key_sums = std::int64_t{block_keys} * shape.head_columns;
    const std::int64_t value_sums = std::int64_t{block_keys} * values.head_columns;
    dq = allocator.take<double>(std::int64_t{shape.padded_rows} * shape.head_columns);
    dk = allocator.take<double>(key_sums);
    dv = allocator.take<double>(value_sums);
    k = allocator.take<float>(key_sums);
    v = allocator.take<float>(value_sums);
    q = allocator.take<double>(shape.head_columns);
    dout = allocator.take<double>(values.head_columns);
  }
};

// scale * (sum + more[i]), computed in double and then rounded.
inline Vec scaled_sum(Vec sum, const double* more, float scale) {
  for (int i = 0; i < lanes; ++i) {
    const double total = static_cast<double>(sum[i]) + more[i];
    sum[i] = static_cast<float>(total * static_cast<double>(scale));
  }
  return sum;
}

inline double from_upper_half(float half) {
  const std::int64_t word = std::int64_t{load_as<std::int32_t>(&half)} << 32;
  return load_as<double>(&word);
}
inline float to_upper_half(double value) {
  const auto word = load_as<std::uint64_t>(&value);
  // Rounds; a NaN of all ones, which torch's softmax gives, would become 0.
  const std::uint64_t rounding = value == value ? 0x80000000u : 0;
  const auto half = static_cast<std::uint32_t>((word + rounding) >> 32);
  return load_as<float>(&half);
}

// Adds the sums of a slot to totals[d].
inline void add_sums(const float* sums, SlotForm form, int columns, double* totals) {
  for (int d = 0; d < columns; ++d) {
    totals[d] += form == SlotForm::halves ? from_upper_half(sums[d]) : static_cast<double>(sums[d]);
  }
}
inline void store_sums(const double* totals, SlotForm form, int columns, float* sums) {
  for (int d = 0; d < columns; ++d) {
    sums[d] = form == SlotForm::halves ? to_upper_half(totals[d]) : static_cast<float>(totals[d]);
  }
}

// The smallest form that can represent the totals.
inline SlotForm form_of(const double* totals, int columns) {
  bool addable = true;
  bool single = true;
  for (int d = 0; d < columns; ++d) {
    const double magnitude = totals[d] < 0 ? -totals[d] : totals[d];
    addable = addable && magnitude < 0x1p100;  // products stay below 2^124
    single = single && magnitude <= 0x1.fffffep127;
  }
  return addable ? SlotForm::addable : single ? SlotForm::single : SlotForm::halves;
}

// Converts a row to fp32, with zeros up to whole vectors.
template <class In>
void load_row(const typename In::Storage* from, int head_dim, float* to) {
  for (int d = 0; d < head_dim; d += lanes) {
    store(to + d, load_widened<In>(from + d, head_dim - d));
  }
}

// A dot product that adds in a fixed order, the same for all rows.
inline double dot(const double* a, const float* b, int columns) {
  double sums[lanes] = {};
  for (int d = 0; d < columns; d += lanes) {
    for (int i = 0; i < lanes; ++i) sums[i] += a[d + i] * static_cast<double>(b[d + i]);
  }
  double sum = 0;
  for (int i = 0; i < lanes; ++i) sum += sums[i];
  return sum;
}

// Computes the elements of one row. s_row is q . k, or the score.
template <class In, class Unit>
void add_large_row(Unit& u, const Tile& tile, const KeyBlock& block, const ScoreForm& form, int row,
                   int strip_row, int visible, const float* s_row) {
  const BackwardTask& t = u.t;
  const int columns = u.shape.head_columns;
  const int value_columns = u.values.head_columns;
  alignas(64) float out[max_head_dim];
  alignas(64) float dout[max_head_dim];
  alignas(64) float q[max_head_dim];
  load_row<In>(tile_rows<In>(t, t.q, tile)(row), t.head_dim, q);
  load_row<In>(tile_rows<In>(t, t.out, tile)(row), t.value_dim, out);
  load_row<In>(tile_rows<In>(t, t.dout, tile)(row), t.value_dim, dout);
  for (int d = 0; d < value_columns; d += lanes) {
    if (t.saturate) store(dout + d, finite_or_zero(load(dout + d)));
  }
  for (int d = 0; d < columns; ++d) u.large.q[d] = static_cast<double>(q[d]);
  for (int d = 0; d < value_columns; ++d) u.large.dout[d] = static_cast<double>(dout[d]);
  // delta is computed like dp below: where a query sees one key, out = v, and their difference is exactly 0.
  const double delta =
      dot(u.large.dout, out, value_columns) - static_cast<double>(u.rows.dlse(tile, row));
  const float* const column = u.terms.columns_of(row);
  // An inf or NaN among the inputs of the scores has made lse NaN and has to propagate. Such a row also has
  // out = NaN, so all its blocks take this path.
  const bool unknown = u.rows.lse[row] != u.rows.lse[row];
  // If inf and NaN propagate, 0 * inf is NaN for a visible element, so an invisible one needs another p.
  const Vec unseen = splat(t.saturate ? 0.0f : -1.0f);
  for (int n = 0; n < visible; n += lanes) {
    const Vec p = unknown ? splat(not_a_number) : u.probability(form, row, n, s_row, column);
    const Int seen = score(form, s_row + n, column + n) > splat(-infinity);
    store(u.row_values + n, seen ? p : unseen);
  }
  double* const dq = u.large.dq + std::int64_t{row} * columns;
  for (int n = 0; n < visible; ++n) {
    const auto p = static_cast<double>(u.row_values[n]);
    if (p < 0 || (p == 0 && t.saturate)) continue;
    const std::int64_t key = std::int64_t{n} * columns;
    const std::int64_t value = std::int64_t{n} * value_columns;
    double ds = p * (dot(u.large.dout, u.large.v + value, value_columns) - delta);
    switch (t.dbias_kind) {
      case DbiasKind::none: break;
      case DbiasKind::per_key:
        if (u.has_bias(tile, row, n))
          u.sums.key_bias_sum(row % t.key_sum_heads, block.key(n)) += ds;
        break;
      case DbiasKind::per_query: u.row_sums[row] += ds; break;
      case DbiasKind::dense:
      case DbiasKind::dense_shared: u.dbias.add(tile, row, block.key(n), ds); break;
    }
    if (t.softcap > 0) ds *= static_cast<double>(u.slope[strip_row * block_keys + n]);
    for (int d = 0; d < columns; ++d) {
      dq[d] += ds * static_cast<double>(u.large.k[key + d]);
      u.large.dk[key + d] += ds * u.large.q[d];
    }
    for (int d = 0; d < value_columns; ++d) u.large.dv[value + d] += p * u.large.dout[d];
  }
}

template <class In, class Element, class Unit>
void add_large_block(Unit& u, const Tile& tile, const KeyBlock& block,
                     const ScoreExponents& exponents, const ScoreForm& form) {
  const BackwardTask& t = u.t;
  const int columns = u.shape.head_columns;
  const int value_columns = u.values.head_columns;
  clear(u.large.dk, std::int64_t{block.count} * columns);
  clear(u.large.dv, std::int64_t{block.count} * value_columns);
  if (!u.large.has_dq) clear(u.large.dq, std::int64_t{u.shape.padded_rows} * columns);
  u.large.has_dq = true;
  u.dbias.begin_elements(tile, block);
  const auto k_row = key_rows<In>(t.k, tile.batch, tile.head, block);
  const auto v_row = key_rows<In>(t.v, tile.batch, tile.head, block);
  for (int n = 0; n < block.count; ++n) {
    load_row<In>(k_row(n), t.head_dim, u.large.k + std::int64_t{n} * columns);
    load_row<In>(v_row(n), t.value_dim, u.large.v + std::int64_t{n} * value_columns);
  }
  constexpr int strip = Element::strip_rows;
  for (int row = u.terms.row_begin / strip * strip; row < u.terms.row_end; row += strip) {
    const int visible = visible_keys(t, tile, block, row + strip - 1);
    u.multiply_scores(tile, block, exponents, form.final, row, round_up(visible, panel_columns),
                      u.s);
    for (int r = 0; r < strip && row + r < tile.rows; ++r) {
      add_large_row<In>(u, tile, block, form, row + r, r, visible, u.s + r * block_keys);
    }
  }
  for (int n = 0; n < block.count; ++n) {
    const std::int64_t slot = u.sums.slot_of(block.key(n));
    double* const dk = u.large.dk + std::int64_t{n} * columns;
    double* const dv = u.large.dv + std::int64_t{n} * value_columns;
    SlotForm& form_now = u.sums.form(slot);
    add_sums(u.sums.dk(slot), form_now, t.head_dim, dk);
    add_sums(u.sums.dv(slot), form_now, t.value_dim, dv);
    const SlotForm dk_form = form_of(dk, t.head_dim);
    const SlotForm dv_form = form_of(dv, t.value_dim);
    form_now = dk_form > dv_form ? dk_form : dv_form;
    store_sums(dk, form_now, t.head_dim, u.sums.dk(slot));
    store_sums(dv, form_now, t.value_dim, u.sums.dv(slot));
    u.sums.some_large = u.sums.some_large || form_now != SlotForm::addable;
  }
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
