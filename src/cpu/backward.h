#pragma once

#include <cstdint>

#include "cpu/key_factors.h"
#include "cpu/keys.h"
#include "cpu/magnitude.h"
#include "cpu/math.h"
#include "cpu/multiply.h"
#include "cpu/pack.h"
#include "cpu/row_factors.h"
#include "cpu/score.h"
#include "cpu/scratch.h"
#include "cpu/task.h"

// Backward: one unit goes through a range of query tiles of one kv head, block of keys by block. Strip
// by strip of rows s = q k^T and dp = dout v^T become p and ds, and dq += ds k; then, over all rows of
// the tile, dv += p^T dout and dk += ds^T q into the unit's own sums. (Dao, arXiv 2307.08691.)
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

template <class In, class Element>
struct BackwardUnit {
  static constexpr int strip = Element::strip_rows;
  static constexpr int key_words = Shape<Element>::key_words;
  using Storage = typename In::Storage;

  const BackwardTask& t;
  const Shape<Element> shape;
  RowFactors<Element, In> q, dout;
  BackwardKeys<In, Element> own_keys;  // packed by this unit
  BackwardKeys<In, Element> keys;      // of the block at hand
  float *s, *dp, *slope;               // [strip, block_keys]
  float* ds_rows;                      // [strip, key_words] words: a of dq += ds k
  float *p_columns, *ds_columns;       // [row_words, block_keys] words: a of the products over rows
  float* pair;                         // [block_keys]: ds of a row
  float* dq;                           // [padded_rows, head_columns]
  float* product;                      // [block_keys, head_columns]; only for gathered keys
  float *lse, *lse_low;                // [padded_rows]
  double* delta;                       // [padded_rows]
  float* row_sums;                     // [padded_rows]
  float* column_sums;                  // [key_sum_heads, block_keys]
  Storage* staged;                     // [block_keys, head_dim]
  std::int32_t *k_exponents, *v_exponents;  // [block_keys]
  std::int32_t* slot_of_key;                // [Sk]; only where the unit's slots are not the keys
  KeyTerms terms;

  std::int64_t first_slot = 0, slots = 0;
  int dq_shift = 0, dk_shift = 0, dv_shift = 0;
  float* dense_sums =
      nullptr;  // [queries, dense_heads, Sk]: ds is added here and nothing else is done
  int dense_heads = 1;

  BackwardUnit(const BackwardTask& task, Arena& arena)
      : t(task), shape(task), own_keys(shape, arena), keys(own_keys) {
    q.take(shape, t, arena);
    dout.take(shape, t, arena);
    s = arena.take<float>(strip * block_keys);
    dp = arena.take<float>(strip * block_keys);
    slope = arena.take<float>(strip * block_keys);
    ds_rows = arena.take<float>(strip * key_words);
    p_columns = arena.take<float>(std::int64_t{shape.row_words} * block_keys);
    ds_columns = arena.take<float>(std::int64_t{shape.row_words} * block_keys);
    pair = arena.take<float>(block_keys);
    dq = arena.take<float>(std::int64_t{shape.padded_rows} * shape.head_columns);
    product = arena.take<float>(gathered() ? std::int64_t{block_keys} * shape.head_columns : 0);
    lse = arena.take<float>(shape.padded_rows);
    lse_low = arena.take<float>(shape.padded_rows);
    delta = arena.take<double>(shape.padded_rows);
    row_sums = arena.take<float>(shape.padded_rows);
    column_sums = arena.take<float>(t.group * block_keys);
    staged = arena.take<Storage>(std::int64_t{block_keys} * t.head_dim);
    k_exponents = arena.take<std::int32_t>(block_keys);
    v_exponents = arena.take<std::int32_t>(block_keys);
    slot_of_key = arena.take<std::int32_t>(t.slot_keys == nullptr ? 0 : t.seqlen_k);
    terms.columns = arena.take<float>(t.group * block_keys);
  }

  void run(std::int64_t unit) {
    const std::int64_t head = unit % t.heads_kv;
    const std::int64_t batch = unit / t.heads_kv % t.batch;
    const std::int64_t segment = unit / (t.heads_kv * t.batch);
    first_slot = t.slot_begin[unit];
    slots = t.slot_count[unit];
    dk_shift = dv_shift = 0;
    clear(dk_sums(0), slots * t.head_dim_padded);
    clear(dv_sums(0), slots * t.head_dim_padded);
    if (t.dbias_kind == DbiasKind::per_key) {
      clear(t.key_sums + first_slot * t.key_sum_heads, slots * t.key_sum_heads);
    }
    if (t.slot_keys != nullptr) {
      for (std::int64_t i = 0; i < slots; ++i) {
        slot_of_key[t.slot_keys[first_slot + i]] = static_cast<std::int32_t>(i);
      }
    }
    for (std::int64_t i = t.segment_tile[segment]; i < t.segment_tile[segment + 1]; ++i) {
      const Tile tile(t, batch, head, i);
      load_tile(tile);
      KeyBlock block;
      for (KeyWalk walk(t, tile, i, KeySource::plan); walk.next(block);) add_block(tile, block);
      store_tile(tile);
    }
    t.dk_shift[unit] = dk_shift;
    t.dv_shift[unit] = dv_shift;
  }

  static void clear(float* data, std::int64_t count) {
    __builtin_memset(data, 0, sizeof(float) * static_cast<std::size_t>(count));
  }
  float* dk_sums(std::int64_t slot) const {
    return t.dk_sums + (first_slot + slot) * t.head_dim_padded;
  }
  float* dv_sums(std::int64_t slot) const {
    return t.dv_sums + (first_slot + slot) * t.head_dim_padded;
  }
  std::int64_t slot_of(std::int64_t key) const {
    return t.slot_keys == nullptr ? key : slot_of_key[key];
  }

  // ---- Rows -------------------------------------------------------------------------------------

  std::int64_t row_index(const Tile& tile, int r) const {
    const std::int64_t head = tile.head * t.group + r % t.group;
    return (tile.batch * t.heads_kv * t.group + head) * t.seqlen_q + tile.first_query + r / t.group;
  }

  void load_tile(const Tile& tile) {
    const auto dout_rows = tile_rows<In>(t, t.dout, tile);
    const auto out_rows = tile_rows<In>(t, t.out, tile);
    q.pack(shape, t, tile_rows<In>(t, t.q, tile), tile.rows, NonFiniteInput::keep);
    dout.pack(shape, t, dout_rows, tile.rows,
              t.saturate ? NonFiniteInput::drop : NonFiniteInput::keep);
    for (int r = 0; r < shape.padded_rows; ++r) {
      // A row without keys, like one behind the end, has p = exp(s - inf) = 0.
      const float row_lse = r < tile.rows ? t.lse[row_index(tile, r)] : -infinity;
      lse[r] = row_lse == -infinity ? infinity : row_lse;
      lse_low[r] = r < tile.rows && t.lse_low != nullptr ? t.lse_low[row_index(tile, r)] : 0.0f;
      row_sums[r] = 0;
    }
    for (int r = 0; r < tile.rows; r += lanes) row_deltas(r, tile.rows, dout_rows, out_rows);
    for (int r = tile.rows; r < shape.padded_rows; ++r) delta[r] = 0;
    dq_shift = 0;
    if (dense_sums != nullptr) return;
    clear(dq, std::int64_t{shape.padded_rows} * shape.head_columns);
    if (q.large) enter_large(dk_shift, t.dk_sums);
    if (dout.large) enter_large(dv_shift, t.dv_sums);
    if (t.dbias_kind == DbiasKind::dense) {
      for (int r = 0; r < tile.rows; ++r) {
        for (std::int64_t key = 0; key < t.seqlen_k; ++key) store_dense(tile, r, key, 0.0f);
      }
    }
  }

  // dout . out of `lanes` rows, a row per lane, summed in the order of a product in fp32: where a query
  // sees one key, out = v, and dp - delta is exactly 0.
  template <class DoutRow, class OutRow>
  void row_deltas(int row, int rows, const DoutRow& dout_row, const OutRow& out_row) {
    const int count = rows - row < lanes ? rows - row : lanes;
    Vec sums{};
    for (int d = 0; d < t.head_dim; d += lanes) {
      Vec elements[lanes] = {}, factors[lanes] = {};
      for (int i = 0; i < count; ++i) {
        elements[i] = load_widened<In>(dout_row(row + i) + d, t.head_dim - d);
        if (t.saturate) elements[i] = finite_or_zero(elements[i]);
        factors[i] = load_widened<In>(out_row(row + i) + d, t.head_dim - d);
      }
      transpose(elements);
      transpose(factors);
      for (int i = 0; i < lanes; ++i) sums = fma(elements[i], factors[i], sums);
    }
    for (int i = 0; i < count; ++i) {
      delta[row + i] = sums[i] - sums[i] == 0 ? static_cast<double>(sums[i])
                                              : long_delta(dout_row(row + i), out_row(row + i));
    }
  }

  // The same where it leaves fp32.
  double long_delta(const Storage* dout_row, const Storage* out_row) const {
    double sum = 0;
    for (int d = 0; d < t.head_dim; ++d) {
      const float element = load_scalar<In>(dout_row, d);
      if (t.saturate && element - element != 0) continue;
      sum += static_cast<double>(element) * static_cast<double>(load_scalar<In>(out_row, d));
    }
    return sum;
  }

  // From here on the unit's sums are in units of 2^sum_unit.
  void enter_large(int& shift, float* sums) {
    if (shift != 0) return;
    shift = sum_unit;
    scale_by_power(sums + first_slot * t.head_dim_padded, slots * t.head_dim_padded, -shift);
  }

  void store_tile(const Tile& tile) {
    if (t.dbias_kind == DbiasKind::per_query) {
      for (int r = 0; r < tile.rows; ++r) t.query_sums[row_index(tile, r)] = row_sums[r];
    }
    if (t.dq.data == nullptr) return;
    const auto rows = tile_rows<In>(t, t.dq, tile);
    for (int r = 0; r < tile.rows; ++r) {
      store_gradient(dq + std::int64_t{r} * shape.head_columns, t.scale, dq_shift,
                     const_cast<Storage*>(rows(r)));
    }
  }

  void store_gradient(const float* sum, float scale, int shift, Storage* to) const {
    for (int d = 0; d < t.head_dim; d += lanes) {
      Vec value = load(sum + d) * splat(scale);
      if (shift != 0) value = value * splat(power_of_two(shift));
      if (t.saturate) value = saturated(value, In::gradient_limit);
      store_narrowed<In>(to + d, value, t.head_dim - d);
    }
  }

  // ---- Blocks -----------------------------------------------------------------------------------

  // Sets `keys` to the factors of the block and returns what its scores have to be multiplied with.
  ScoreExponents load_keys(const Tile& tile, const KeyBlock& block) {
    ScoreExponents exponents;
    if (q.large) exponents.queries = q.exponents;
    for (int n = 0; n < block_keys; ++n) k_exponents[n] = v_exponents[n] = 0;
    if (t.packed_keys != nullptr) {
      keys = shared_keys<BackwardKeys<In, Element>, Element>(t, shape, tile.batch, tile.head,
                                                             block.start);
      if (!keys.large->any()) return exponents;
    }
    keys = own_keys;
    const auto k_rows = key_rows<In>(t.k, tile.batch, tile.head, block);
    const auto v_rows = key_rows<In>(t.v, tile.batch, tile.head, block);
    keys.pack(t, k_rows, v_rows, block.count);
    const auto from = staged_rows(staged, t.head_dim);
    if (keys.large->k != 0) {
      stage_rows<In>(k_rows, block.count, t.head_dim, NonFiniteInput::keep, staged, k_exponents);
      pack_transposed<In, Element>(from, block.count, t.head_dim, keys.k_transposed);
      pack_panels<In, Element>(from, block.count, padded_depth<Element>(block.count), t.head_dim,
                               keys.k_panels);
      exponents.keys = k_exponents;
      if (dq_shift == 0 && dense_sums == nullptr) {
        dq_shift = sum_unit;
        scale_by_power(dq, std::int64_t{shape.padded_rows} * shape.head_columns, -dq_shift);
      }
    }
    if (keys.large->v != 0) {
      stage_rows<In>(v_rows, block.count, t.head_dim, NonFiniteInput::keep, staged, v_exponents);
      pack_transposed<In, Element>(from, block.count, t.head_dim, keys.v_transposed);
    }
    return exponents;
  }

  void add_block(const Tile& tile, const KeyBlock& block) {
    prepare_terms(t, tile, block, terms);
    if (terms.empty()) return;
    const ScoreExponents exponents = load_keys(tile, block);
    const bool long_dp = keys.large->v != 0 || dout.large;
    const bool general = needs_score_rows(t, terms, exponents);
    const int keys_padded = round_up(block.count, Element::strip_rows);
    const int row_begin = terms.row_begin / strip * strip;
    const int row_end = round_up(terms.row_end, strip);
    clear(column_sums, std::int64_t{t.key_sum_heads} * block_keys);
    for (int row = row_begin; row < row_end; row += strip) {
      const int visible = visible_keys(t, tile, block, row + strip - 1);
      const int columns = round_up(visible, panel_columns);
      float* const s_rows = Element::per_word == 1 ? column_words(p_columns, row) : s;
      float* const dp_rows = Element::per_word == 1 ? column_words(ds_columns, row) : dp;
      multiply<Element, Layout::row_major, Store::replace>(row_words(q, row), keys.k_transposed,
                                                           {s_rows, block_keys}, strip, columns,
                                                           shape.head_words);
      if (general) {
        score_rows(t, tile, block, terms, exponents, row, strip, columns, s_rows,
                   t.softcap > 0 ? slope : nullptr);
      }
      multiply<Element, Layout::row_major, Store::replace>(row_words(dout, row), keys.v_transposed,
                                                           {dp_rows, block_keys}, strip, columns,
                                                           shape.head_words);
      for (int r = 0; r < strip; ++r) {
        pair_row(tile, block, row + r, r, visible, {t.scale, general}, long_dp,
                 s_rows + r * block_keys, dp_rows + r * block_keys);
      }
      if (dense_sums != nullptr) continue;
      if constexpr (Element::per_word != 1) {
        Element::store_columns(s, strip, columns, block_keys, column_words(p_columns, row));
        Element::store_columns(dp, strip, columns, block_keys, column_words(ds_columns, row));
      }
      multiply<Element, Layout::row_major, Store::add>(
          {ds_rows, key_words}, keys.k_panels,
          {dq + std::int64_t{row} * shape.head_columns, shape.head_columns}, strip,
          shape.head_columns, depth_words<Element>(visible));
      clear_columns(columns, keys_padded, row);
    }
    if (dense_sums != nullptr) return;
    const std::int64_t first_word = row_begin / Element::per_word;
    const std::int64_t words = (row_end - row_begin) / Element::per_word;
    const Product dv =
        multiply_columns(block, p_columns, dout.panels, first_word, words, t.dv_sums);
    if (dout.nonfinite) add_nonfinite_dout(tile, block, dv);
    if (gathered()) add_product(block, t.dv_sums);
    multiply_columns(block, ds_columns, q.panels, first_word, words, t.dk_sums);
    if (gathered()) add_product(block, t.dk_sums);
    if (t.dbias_kind == DbiasKind::per_key) add_column_sums(block);
  }

  static Factor row_words(const RowFactors<Element, In>& rows, int row) {
    return {rows.row_major.words + std::int64_t{row} * rows.row_major.ld, rows.row_major.ld};
  }
  static float* column_words(float* words, int row) {
    return words + std::int64_t{row / Element::per_word} * block_keys;
  }

  // The products over rows read whole strips of keys, of which some have not been written.
  void clear_columns(int begin, int end, int row) {
    for (int w = 0; begin < end && w < strip / Element::per_word; ++w) {
      clear(column_words(p_columns, row) + w * block_keys + begin, end - begin);
      clear(column_words(ds_columns, row) + w * block_keys + begin, end - begin);
    }
  }

  bool gathered() const { return t.slot_keys != nullptr; }

  // a^T b, over words of rows: in `product` where the keys of a block have slots all over the unit,
  // added to the sums where they follow each other. Returns where.
  Product multiply_columns(const KeyBlock& block, const float* a, const Panels& b,
                           std::int64_t first_word, std::int64_t words, float* sums) {
    const Factor columns{a + first_word * block_keys, block_keys};
    const Panels panels{b.words + first_word * panel_columns, b.panel_stride};
    const int keys_padded = round_up(block.count, Element::strip_rows);
    if (gathered()) {
      const Product to{product, shape.head_columns};
      multiply<Element, Layout::transposed, Store::replace>(columns, panels, to, keys_padded,
                                                            shape.head_columns, words);
      return to;
    }
    const Product to{sums + (first_slot + block.start) * t.head_dim_padded, t.head_dim_padded};
    multiply<Element, Layout::transposed, Store::add>(columns, panels, to, keys_padded,
                                                      shape.head_columns, words);
    return to;
  }

  void add_nonfinite_dout(const Tile& tile, const KeyBlock& block, Product dv) {
    const auto probability = [this, &tile](int n, int row) {
      if (row < terms.row_begin || row >= terms.row_end || row >= tile.rows) return 0.0f;
      constexpr int per_word = Element::per_word;
      return Element::element(p_columns,
                              (row / per_word * block_keys + n) * per_word + row % per_word);
    };
    add_nonfinite<In>(probability, tile_rows<In>(t, t.dout, tile), block.count, tile.rows,
                      t.head_dim, dv);
  }

  // sums[slot of key n] += product[n]
  void add_product(const KeyBlock& block, float* sums) {
    for (int n = 0; n < block.count; ++n) {
      float* to = sums + (first_slot + slot_of(block.key(n))) * t.head_dim_padded;
      const float* from = product + std::int64_t{n} * shape.head_columns;
      for (int d = 0; d < shape.head_columns; d += lanes)
        store(to + d, load(to + d) + load(from + d));
    }
  }

  void add_column_sums(const KeyBlock& block) {
    for (int g = 0; g < t.key_sum_heads; ++g) {
      float* sums = t.key_sums + first_slot * t.key_sum_heads + g * slots;
      for (int n = 0; n < block.count; ++n) {
        sums[slot_of(block.key(n))] += column_sums[g * block_keys + n];
      }
    }
  }

  // One row of pairs: in, q . k (or the score) and dout . v; out, p and ds as factors of dv and dk,
  // and ds as a factor of dq.
  void pair_row(const Tile& tile, const KeyBlock& block, int row, int strip_row, int visible,
                const ScoreForm& form, bool long_dp, float* s_row, float* dp_row) {
    const int columns = round_up(visible, panel_columns);
    const float* column = terms.columns_of(row);
    const Vec row_lse = splat(lse[row]);
    const Vec row_low = splat(lse_low[row]);
    const Vec row_delta = splat(static_cast<float>(delta[row]));
    float* sums = column_sums + row % t.key_sum_heads * std::int64_t{block_keys};
    Vec total{};
    for (int n = 0; n < columns; n += 2 * lanes) {
      Vec words[2];
      for (int half = 0; half < 2; ++half) {
        const int at = n + half * lanes;
        const Vec p =
            min(exp((score(form, s_row + at, column + at) - row_lse) - row_low), splat(1.0f));
        Vec ds = long_dp ? long_ds(row, at, p, dp_row + at) : p * (load(dp_row + at) - row_delta);
        ds = p > Vec{} ? ds : Vec{};
        if (t.saturate) ds = saturated(ds, float_max);
        store(sums + at, load(sums + at) + ds);
        total = total + ds;
        store(pair + at, ds);
        if (t.softcap > 0) ds = ds * load(slope + std::int64_t{strip_row} * block_keys + at);
        if (t.saturate) ds = saturated(ds, In::gradient_limit);
        words[half] = ds;
        store(s_row + at, dv_shift == 0 ? p : p * splat(row_factor(dout, row, dv_shift)));
        store(dp_row + at, dk_shift == 0 ? ds : limited(ds * splat(row_factor(q, row, dk_shift))));
        if (dq_shift != 0) {
          words[half] = limited(scaled(ds, k_exponents + at, dq_shift));
        }
      }
      Element::store_row(ds_rows + strip_row * key_words, n, words[0], words[1]);
    }
    if (t.dbias_kind == DbiasKind::per_query) row_sums[row] += reduce_add(total);
    if (row >= tile.rows) return;
    if (dense_sums != nullptr) {
      float* to = dense_sums + (row / t.group * dense_heads + row % dense_heads) * t.seqlen_k;
      for (int n = 0; n < visible; ++n) to[block.key(n)] += pair[n];
    } else if (t.dbias_kind == DbiasKind::dense) {
      for (int n = 0; n < visible; ++n) store_dense(tile, row, block.key(n), pair[n]);
    }
  }

  // Finite stays finite: what saturates at 2^127 before it was scaled does so after.
  Vec limited(Vec v) const { return t.saturate ? saturated(v, In::gradient_limit) : v; }

  float row_factor(const RowFactors<Element, In>& rows, int row, int shift) const {
    return power_of_two(rows.exponents[row] - shift);
  }

  // p (dp - delta) in double, which holds what fp32 cannot.
  Vec long_ds(int row, int at, Vec p, const float* dp_at) const {
    Vec ds{};
    for (int i = 0; i < lanes; ++i) {
      const int exponent = dout.exponents[row] + v_exponents[at + i];
      const double dp_true = __builtin_ldexp(static_cast<double>(dp_at[i]), exponent);
      const double value = static_cast<double>(p[i]) * (dp_true - delta[row]);
      const double limit = 0x1.fffffep127;
      ds[i] = static_cast<float>(!t.saturate     ? value
                                 : value < limit ? (value > -limit ? value : -limit)
                                                 : limit);
    }
    return ds;
  }

  void store_dense(const Tile& tile, int row, std::int64_t key, float ds) const {
    const std::int64_t at = tile.batch * t.dbias.batch + tile.head * t.dbias.kv_head +
                            row % t.group * t.dbias.group_head +
                            (tile.first_query + row / t.group) * t.dbias.query;
    store_scalar(t.dbias.data, t.dbias.dtype, at + key * t.dbias.key, ds, t.saturate);
  }
};

template <class In, class Element>
std::int64_t backward_scratch(const BackwardTask& task) {
  Arena arena(nullptr);
  BackwardUnit<In, Element> whole(task, arena);
  if (task.dbias_kind == DbiasKind::dense_shared) {
    arena.take<float>(task.tile_queries * task.group * task.seqlen_k);
  }
  return arena.used();
}

template <class In, class Element>
void backward_unit(const BackwardTask& task, std::int64_t unit, void* scratch) {
  Arena arena(scratch);
  [[maybe_unused]] const typename Element::Session session;
  BackwardUnit<In, Element>(task, arena).run(unit);
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
