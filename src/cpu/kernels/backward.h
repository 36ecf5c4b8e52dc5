#pragma once

#include <cstdint>

#include "cpu/kernels/backward_rows.h"
#include "cpu/kernels/dense_dbias.h"
#include "cpu/kernels/key_factors.h"
#include "cpu/kernels/keys.h"
#include "cpu/kernels/math.h"
#include "cpu/kernels/multiply.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/row_products.h"
#include "cpu/kernels/score.h"
#include "cpu/kernels/scratch.h"
#include "cpu/kernels/slot_sums.h"
#include "cpu/task.h"

// Backward: one unit visits a range of query tiles of one kv head, block of keys by block. Strip
// by strip of rows s = q k^T and dp = dout v^T become p and ds, and dq += ds k; then, over all rows of
// the tile, dv += p^T dout and dk += ds^T q into the unit's own sums. (Dao, arXiv 2307.08691.)
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

template <class In, class Element>
struct BackwardUnit {
  static constexpr int strip = Element::strip_rows;
  static constexpr int key_words = Shape<Element>::key_words;
  using Storage = typename In::Storage;

  const BackwardTask& t;
  const Shape<Element> shape;      // of q and k
  const Shape<Element> values;     // of v and dout
  BackwardRows<In, Element> rows;  // of the current tile
  SlotSums sums;
  BackwardKeys<In, Element> keys;     // of the current block
  float *s, *dp, *slope, *row_terms;  // [strip, block_keys]
  float* products;                    // [rows, block_keys]: q k^T of the tile; only of few queries
  float* ds_rows;                     // [strip, key_words] words: a of dq += ds k
  float *p_columns, *ds_columns;      // [row_words, block_keys] words: a of the products over rows
  float* row_values;   // [block_keys]: p or ds of a row, where single elements are used
  float* dq;           // [padded_rows, head_columns]
  float* product;      // [block_keys, head_columns]; only for gathered keys
  double* row_sums;    // [padded_rows]
  float* column_sums;  // [key_sum_heads, block_keys]: of ds, in a few rows
  double* block_sums;  // the same, in all rows of the tile
  KeyTerms terms;

  DenseDbias dbias;

  BackwardUnit(const BackwardTask& task, ScratchAllocator& allocator)
      : t(task),
        shape(task),
        values(task, task.value_dim),
        rows(task, shape, values, allocator),
        sums(task, allocator),
        keys(task, allocator),
        dbias{task} {
    s = allocator.take<float>(strip * block_keys);
    dp = allocator.take<float>(strip * block_keys);
    slope = allocator.take<float>(strip * block_keys);
    row_terms = allocator.take<float>(strip * block_keys);
    products = allocator.take<float>(t.few_queries ? std::int64_t{shape.rows} * block_keys : 0);
    ds_rows = allocator.take<float>(strip * key_words);
    p_columns = allocator.take<float>(std::int64_t{shape.row_words} * block_keys);
    ds_columns = allocator.take<float>(std::int64_t{shape.row_words} * block_keys);
    row_values = allocator.take<float>(block_keys);
    dq = allocator.take<float>(std::int64_t{shape.padded_rows} * shape.head_columns);
    product = allocator.take<float>(
        sums.is_gathered() ? std::int64_t{block_keys} * shape.head_columns : 0);
    row_sums = allocator.take<double>(shape.padded_rows);
    column_sums = allocator.take<float>(t.group * block_keys);
    block_sums = allocator.take<double>(t.group * block_keys);
    take_columns(t, allocator, terms);
  }

  void run(std::int64_t unit) {
    const std::int64_t head = unit % t.heads_kv;
    const std::int64_t batch = unit / t.heads_kv % t.batch;
    const std::int64_t segment = unit / (t.heads_kv * t.batch);
    sums.select(segment, batch, head);
    sums.set_to_zero();
    for (std::int64_t i = t.segment_tile[segment]; i < t.segment_tile[segment + 1]; ++i) {
      add_tile(Tile(t, batch, head, i), i);
    }
  }

  void add_tile(const Tile& tile, std::int64_t index) {
    load_tile(tile);
    KeyBlock block;
    for (KeyBlockIterator blocks(t, tile, index, KeySource::tile_list); blocks.next(block);)
      add_block(tile, block);
    store_tile(tile);
  }

  // ---- Rows -------------------------------------------------------------------------------------

  void load_tile(const Tile& tile) {
    rows.load_tile(tile);
    clear(row_sums, shape.padded_rows);
    clear(dq, std::int64_t{shape.padded_rows} * shape.head_columns);
    dbias.begin_tile(tile);
  }

  void store_tile(const Tile& tile) {
    if (t.dbias_kind == DbiasKind::per_query) {
      for (int r = 0; r < tile.rows; ++r) t.query_sums[rows.index(tile, r)] = row_sums[r];
    }
    if (t.dq.data == nullptr) return;
    const auto dq_rows = tile_rows<In>(t, t.dq, tile);
    for (int r = 0; r < tile.rows; ++r) {
      const std::int64_t at = std::int64_t{r} * shape.head_columns;
      auto* to = const_cast<Storage*>(dq_rows(r));
      for (int d = 0; d < t.head_dim; d += lanes) {
        Vec value = load(dq + at + d) * splat(t.scale);
        if (t.saturate) value = saturated(value, In::gradient_limit);
        store_narrowed<In>(to + d, value, t.head_dim - d);
      }
    }
  }

  // ---- Blocks -----------------------------------------------------------------------------------

  // Sets `keys` to the factors of the block.
  void load_keys(const Tile& tile, const KeyBlock& block) {
    const auto k_rows = key_rows<In>(t.k, tile.batch, tile.head, block);
    if (t.packed_keys != nullptr) {
      keys = shared_keys<BackwardKeys<In, Element>>(t, tile.batch, tile.head, block.start);
    } else {
      keys.pack(t, k_rows, key_rows<In>(t.v, tile.batch, tile.head, block), block.count);
    }
    if (t.few_queries) multiply_rows(tile, block, k_rows);
  }

  // products = q k^T of all rows of the tile, by the function that the forward of few queries calls. The keys have just
  // been packed.
  template <class KeyRow>
  void multiply_rows(const Tile& tile, const KeyBlock& block, const KeyRow& k_rows) {
    const int visible = visible_keys(t, tile, block, tile.rows - 1);
    const RowAddresses<Storage> addresses(k_rows, visible, [&](int) { return k_rows(0); });
    multiply_keys<In, Element, RowsIn::cache>(
        rows.q.row_major.words, rows.q.row_major.ld, tile.rows, addresses, visible,
        round_up(visible, panel_columns), t.head_dim, products);
  }

  void copy_products(const Tile& tile, int row, int columns, float* s_rows) const {
    for (int r = row; r < row + strip; ++r, s_rows += block_keys) {
      const float* from = products + std::int64_t{r} * block_keys;
      for (int n = 0; n < columns; n += lanes) {
        store(s_rows + n, r < tile.rows ? load(from + n) : Vec{});
      }
    }
  }

  // Computes q k^T of a strip of rows, and its scores.
  StripScores multiply_scores(const Tile& tile, const KeyBlock& block, int row, int columns,
                              float* s_rows) {
    if (t.few_queries) {
      copy_products(tile, row, columns, s_rows);
    } else {
      multiply<Element, Layout::row_major, Store::replace>(row_words(rows.q, row),
                                                           keys.k_transposed, {s_rows, block_keys},
                                                           strip, columns, shape.head_words);
    }
    return make_scores(t, tile, block, terms, larger(rows.q.numbers, keys.numbers->k), row, strip,
                       columns, s_rows, row_terms, t.softcap > 0 ? slope : nullptr, nullptr);
  }

  // The class of all numbers that enter the gradients of a block. Saturation treats inf and NaN like large numbers.
  Numbers block_numbers() const {
    const Numbers numbers = larger(rows.numbers, larger(keys.numbers->k, keys.numbers->v));
    return t.saturate && numbers == Numbers::nonfinite ? Numbers::large : numbers;
  }

  void add_block(const Tile& tile, const KeyBlock& block) {
    prepare_terms(t, tile, block, terms);
    if (terms.empty()) return;
    load_keys(tile, block);
    const Numbers numbers = block_numbers();
    const int keys_padded = round_up(block.count, Element::strip_rows);
    const int row_begin = terms.row_begin / strip * strip;
    const int row_end = round_up(terms.row_end, strip);
    const bool per_key = adds_key_sums();
    clear(column_sums, std::int64_t{t.key_sum_heads} * block_keys);
    clear(block_sums, std::int64_t{t.key_sum_heads} * block_keys);
    for (int row = row_begin; row < row_end; row += strip) {
      const int visible = visible_keys(t, tile, block, row + strip - 1);
      const int columns = round_up(visible, panel_columns);
      float* const s_rows = Element::per_word == 1 ? column_words(p_columns, row) : s;
      float* const dp_rows = Element::per_word == 1 ? column_words(ds_columns, row) : dp;
      const StripScores scores = multiply_scores(tile, block, row, columns, s_rows);
      multiply<Element, Layout::row_major, Store::replace>(row_words(rows.dout, row),
                                                           keys.v_transposed, {dp_rows, block_keys},
                                                           strip, columns, values.head_words);
      for (int r = 0; r < strip; ++r) {
        float* const dp_row = dp_rows + r * block_keys;
        switch (numbers) {
          case Numbers::ordinary:
            pair_row<Numbers::ordinary>(tile, block, r, visible, scores, dp_row);
            break;
          case Numbers::large:
            pair_row<Numbers::large>(tile, block, r, visible, scores, dp_row);
            break;
          case Numbers::nonfinite:
            pair_row<Numbers::nonfinite>(tile, block, r, visible, scores, dp_row);
            add_nonfinite_dout(tile, block, r, visible, scores);
        }
      }
      // Each head then has about as many rows in column_sums as a strip has.
      if (per_key && (row / strip % t.key_sum_heads == 0 || row + strip >= row_end)) {
        add_column_sums();
      }
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
    multiply_columns(tile, block, row_begin, row_end, p_columns, rows.dout.panels,
                     values.head_columns, t.dv_sums);
    multiply_columns(tile, block, row_begin, row_end, ds_columns, rows.q.panels, shape.head_columns,
                     t.dk_sums);
    if (per_key) add_block_sums(block);
  }

  static Factor row_words(const RowFactors<Element>& of, int row) {
    return {of.row_major.words + std::int64_t{row} * of.row_major.ld, of.row_major.ld};
  }
  static float* column_words(float* words, int row) {
    return words + std::int64_t{row / Element::per_word} * block_keys;
  }

  // The products over rows read strips of keys, some of which have not been written.
  void clear_columns(int begin, int end, int row) {
    for (int w = 0; begin < end && w < strip / Element::per_word; ++w) {
      clear(column_words(p_columns, row) + w * block_keys + begin, end - begin);
      clear(column_words(ds_columns, row) + w * block_keys + begin, end - begin);
    }
  }

  // to_sums += a^T b over rows [row_begin, row_end): through `product` where the keys of a block have slots
  // all over the unit.
  void multiply_columns(const Tile& tile, const KeyBlock& block, int row_begin, int row_end,
                        const float* a, const Panels& b, int columns, float* to_sums) {
    const int keys_padded = round_up(block.count, strip);
    const auto multiply_rows = [&]<Store mode>(int key, int count, int row, Product to) {
      const std::int64_t word = row / Element::per_word;
      multiply<Element, Layout::transposed, mode>({a + word * block_keys + key, block_keys},
                                                  {b.words + word * panel_columns, b.panel_stride},
                                                  {to.data + key * to.ld, to.ld}, count, columns,
                                                  (row_end - row) / Element::per_word);
    };
    if (sums.is_gathered()) {
      const Product to{product, columns};
      multiply_rows.template operator()<Store::replace>(0, keys_padded, row_begin, to);
      return sums.add_rows(block, to, columns, to_sums);
    }
    const Product to{to_sums + (sums.first_slot + block.start) * t.head_dim_padded,
                     t.head_dim_padded};
    // On the diagonal of a causal mask, later keys are seen by fewer rows.
    const int step = t.causal && block.partial ? round_up(48, strip) : keys_padded;
    for (int key = 0; key < keys_padded; key += step) {
      const int first = first_row(t, tile, block, key) / strip * strip;
      const int row = first > row_begin ? first : row_begin;
      const int keys_left = keys_padded - key < step ? keys_padded - key : step;
      if (row < row_end) multiply_rows.template operator()<Store::add>(key, keys_left, row, to);
    }
  }

  // fp32 sums of all rows of a tile have two to five times the error of their terms.
  void add_column_sums() {
    for (int i = 0; i < t.key_sum_heads * block_keys; ++i) {
      block_sums[i] += static_cast<double>(column_sums[i]);
      column_sums[i] = 0;
    }
  }

  void add_block_sums(const KeyBlock& block) {
    for (int g = 0; g < t.key_sum_heads; ++g) {
      for (int n = 0; n < block.count; ++n) {
        sums.key_bias_sum(g, block.key(n)) += block_sums[g * block_keys + n];
      }
    }
  }

  // Whether ds of the current block is a gradient of its keys' biases, for some queries at least.
  bool adds_key_sums() const {
    return t.dbias_kind == DbiasKind::per_key && terms.bias_use != BiasUse::none;
  }
  bool has_bias(const Tile& tile, int row, int n) const {
    if (terms.bias_use != BiasUse::some) return terms.bias_use == BiasUse::all;
    return tile.first_query + row / t.group >= terms.biases_begin[n];
  }
  // ds of keys [n, n + lanes) where the score has the bias, else 0.
  Vec with_bias(std::int64_t query, int n, Vec ds) const {
    if (terms.bias_use == BiasUse::all) return ds;
    return terms.counts(query, n) ? ds : Vec{};
  }

  // One row of elements: in, scores and dout . v; out, p and ds as factors of dv and dk, and ds as a factor of dq.
  template <Numbers numbers>
  void pair_row(const Tile& tile, const KeyBlock& block, int strip_row, int visible,
                const StripScores& scores, float* dp_row) {
    const int row = scores.row + strip_row;
    const int columns = round_up(visible, panel_columns);
    ScoreRow score = scores[strip_row];
    float lse = rows.lse[row];
    if (!scores.final && subtracts_first(t.dtype, lse)) {
      subtract_reference(score, lse, columns);
      score = score.differences();
      lse = 0;
    }
    const Vec lse_low = splat(rows.lse_low[row]);
    const Vec row_delta = splat(rows.delta[row]);
    float* key_sums = column_sums + row % t.key_sum_heads * std::int64_t{block_keys};
    const bool per_key = adds_key_sums();
    const std::int64_t query = tile.first_query + row / t.group;
    const bool dense = dbias.is_wanted();
    Vec total{};
    for (int n = 0; n < columns; n += panel_columns) {
      Vec words[2];
      for (int half = 0; half < 2; ++half) {
        const int at = n + half * lanes;
        Vec p = min(exp((score(at) - splat(lse)) - lse_low), splat(1.0f));
        Vec dout_v = load(dp_row + at);
        if constexpr (numbers == Numbers::large) dout_v = limited_gradient(dout_v);
        Vec ds = p * (dout_v - row_delta);
        if constexpr (numbers == Numbers::nonfinite) {
          const Vec term =
              row < tile.rows ? load(scores.terms_of(strip_row) + at) : splat(-infinity);
          const Int seen = term > splat(-infinity);
          const Vec unknown = splat(lse == lse ? 0.0f : not_a_number);
          p = seen ? p + unknown : Vec{};
          ds = seen ? ds + unknown : Vec{};
        }
        if (per_key) store(key_sums + at, load(key_sums + at) + with_bias(query, at, ds));
        if (dense) store(row_values + at, ds);
        total = total + ds;
        if (t.softcap > 0) ds = ds * load(slope + std::int64_t{strip_row} * block_keys + at);
        words[half] = ds;
        store(score.s + at, p);
        store(dp_row + at, ds);
      }
      Element::store_row(ds_rows + strip_row * key_words, n, words[0], words[1]);
    }
    if (t.dbias_kind == DbiasKind::per_query)
      row_sums[row] += static_cast<double>(reduce_add(total));
    if (dense && row < tile.rows) dbias.add_row(tile, block, row, visible, row_values);
  }

  // Adds the elements of dout that are inf or NaN, which the panels of dout do not have, to dv.
  void add_nonfinite_dout(const Tile& tile, const KeyBlock& block, int strip_row, int visible,
                          const StripScores& scores) const {
    const int row = scores.row + strip_row;
    if (row >= tile.rows) return;
    const float* const p = scores[strip_row].s;
    add_nonfinite<In>([&](int n, int) { return p[n]; },
                      [&](int n, int) { return scores.sees(strip_row, n); },
                      [&](int) { return tile_rows<In>(t, t.dout, tile)(row); }, visible, 1,
                      t.value_dim, [&](int n) { return sums.dv(sums.slot_of(block.key(n))); });
  }
};

template <class In, class Element>
std::int64_t backward_scratch(const BackwardTask& task) {
  ScratchAllocator allocator(nullptr);
  BackwardUnit<In, Element> whole(task, allocator);
  if (task.dbias_kind == DbiasKind::dense_shared && task.dbias_parts == 1) {
    allocator.take<double>(task.tile_queries * task.dbias_heads * task.seqlen_k);
  }
  return allocator.used();
}

template <class In, class Element>
void backward_unit(const BackwardTask& task, std::int64_t unit, void* scratch) {
  ScratchAllocator allocator(scratch);
  [[maybe_unused]] const typename Element::Session session;
  BackwardUnit<In, Element>(task, allocator).run(unit);
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
