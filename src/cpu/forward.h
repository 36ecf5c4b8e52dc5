#pragma once

#include <cstdint>

#include "cpu/key_factors.h"
#include "cpu/keys.h"
#include "cpu/magnitude.h"
#include "cpu/math.h"
#include "cpu/multiply.h"
#include "cpu/pack.h"
#include "cpu/score.h"
#include "cpu/scratch.h"
#include "cpu/task.h"

// Forward: one item is a tile of queries of one kv head, all heads of its group stacked. For each
// block of keys, strip by strip of rows: s = q k^T, the online softmax, out += p v.
// (Milakov, Gimelshein, arXiv 1805.02867; Dao, arXiv 2307.08691.)
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

template <class In, class Element>
struct ForwardTile {
  static constexpr int strip = Element::strip_rows;
  using Storage = typename In::Storage;

  const ForwardTask& t;
  const Shape<Element> shape;
  Factor q;
  ForwardKeys<In, Element> own_keys;  // packed by this tile
  ForwardKeys<In, Element> keys;      // of the current block
  float* s;                           // [strip, block_keys]
  float* p;                           // [strip, key_words] words; s itself where a word is an fp32
  float* out;                         // [padded_rows, head_columns]
  float* row_max;                     // [padded_rows]
  float* row_sum;                     // [padded_rows, lanes]: partial sums
  Storage* staged;
  std::int32_t* q_exponents;  // [padded_rows]
  std::int32_t* k_exponents;  // [block_keys]
  std::int32_t* v_exponents;  // [block_keys]
  bool* unknown;              // [padded_rows]: inf or NaN made a score of the row, and shall show
  KeyTerms terms;
  bool q_large = false;
  int out_shift = 0;  // out is in units of 2^out_shift

  ForwardTile(const ForwardTask& task, ScratchAllocator& allocator)
      : t(task), shape(task), own_keys(shape, allocator), keys(own_keys) {
    q = shape.take_row_major(allocator);
    s = allocator.take<float>(strip * block_keys);
    p = Element::per_word == 1 ? s : allocator.take<float>(strip * Shape<Element>::key_words);
    out = allocator.take<float>(std::int64_t{shape.padded_rows} * shape.head_columns);
    row_max = allocator.take<float>(shape.padded_rows);
    row_sum = allocator.take<float>(std::int64_t{shape.padded_rows} * lanes);
    staged = allocator.take<Storage>(
        std::int64_t{shape.rows > block_keys ? shape.rows : block_keys} * t.head_dim);
    q_exponents = allocator.take<std::int32_t>(shape.padded_rows);
    k_exponents = allocator.take<std::int32_t>(block_keys);
    v_exponents = allocator.take<std::int32_t>(block_keys);
    unknown = allocator.take<bool>(shape.padded_rows);
    terms.columns = allocator.take<float>(t.group * block_keys);
  }

  void run(const Tile& tile, std::int64_t tile_index) {
    load_queries(tile);
    KeyBlock block;
    for (KeyWalk walk(t, tile, tile_index, KeySource::tile_list); walk.next(block);) {
      prepare_terms(t, tile, block, terms);
      if (terms.empty()) continue;
      const ScoreExponents exponents = load_keys(tile, block);
      const bool general = needs_score_rows(t, terms, exponents);
      for (int row = terms.row_begin / strip * strip; row < terms.row_end; row += strip) {
        const int visible = visible_keys(t, tile, block, row + strip - 1);
        const int columns = round_up(visible, panel_columns);
        multiply<Element, Layout::row_major, Store::replace>(
            {q.words + std::int64_t{row} * q.ld, q.ld}, keys.k, {s, block_keys}, strip, columns,
            shape.head_words);
        if (general) {
          score_rows(t, tile, block, terms, exponents, row, strip, columns, s, nullptr,
                     t.saturate ? nullptr : unknown);
        }
        softmax(row, columns, {t.scale, general});
        const Product out_rows{out + std::int64_t{row} * shape.head_columns, shape.head_columns};
        if (keys.large->v != 0) add_nonfinite_values(tile, block, visible, out_rows);
        multiply<Element, Layout::row_major, Store::add>({p, Shape<Element>::key_words}, keys.v,
                                                         out_rows, strip, shape.head_columns,
                                                         depth_words<Element>(visible));
      }
    }
    finish(tile);
  }

  void load_queries(const Tile& tile) {
    const auto rows = tile_rows<In>(t, t.q, tile);
    float* words = const_cast<float*>(q.words);
    const int ld = shape.head_ld;
    q_large =
        is_large(pack_rows<In, Element>(rows, tile.rows, shape.padded_rows, t.head_dim, words, ld));
    if (q_large) {
      stage_rows<In>(rows, tile.rows, t.head_dim, NonFiniteInput::keep, staged, q_exponents);
      pack_rows<In, Element>(staged_rows(staged, t.head_dim), tile.rows, shape.padded_rows,
                             t.head_dim, words, ld);
    }
    for (int r = 0; r < shape.padded_rows; ++r) row_max[r] = -infinity;
    __builtin_memset(unknown, 0, static_cast<unsigned>(shape.padded_rows));
    __builtin_memset(row_sum, 0, sizeof(float) * lanes * static_cast<unsigned>(shape.padded_rows));
    __builtin_memset(out, 0,
                     sizeof(float) * static_cast<unsigned>(shape.padded_rows) *
                         static_cast<unsigned>(shape.head_columns));
    out_shift = 0;
  }

  // Sets `keys` to the factors of the block and returns the factor of its scores.
  ScoreExponents load_keys(const Tile& tile, const KeyBlock& block) {
    ScoreExponents exponents;
    if (q_large) exponents.queries = q_exponents;
    for (int n = 0; n < block_keys; ++n) v_exponents[n] = 0;
    if (t.packed_keys != nullptr) {
      keys = shared_keys<ForwardKeys<In, Element>, Element>(t, shape, tile.batch, tile.head,
                                                            block.start);
      if (!keys.large->any()) return exponents;
    }
    keys = own_keys;
    const auto k_rows = key_rows<In>(t.k, tile.batch, tile.head, block);
    const auto v_rows = key_rows<In>(t.v, tile.batch, tile.head, block);
    keys.pack(t, k_rows, v_rows, block.count);
    const auto from = staged_rows(staged, t.head_dim);
    if (keys.large->k != 0) {
      for (int n = block.count; n < block_keys; ++n) k_exponents[n] = 0;
      stage_rows<In>(k_rows, block.count, t.head_dim, NonFiniteInput::keep, staged, k_exponents);
      pack_transposed<In, Element>(from, block.count, t.head_dim, keys.k);
      exponents.keys = k_exponents;
    }
    if (keys.large->v != 0) {
      stage_rows<In>(v_rows, block.count, t.head_dim, NonFiniteInput::drop, staged, v_exponents);
      pack_panels<In, Element>(from, block.count, padded_depth<Element>(block.count), t.head_dim,
                               keys.v);
      if (out_shift == 0) {
        out_shift = sum_unit;
        scale_by_power(out, std::int64_t{shape.padded_rows} * shape.head_columns, -out_shift);
      }
    }
    return exponents;
  }

  // p = exp(s - max) for a strip; earlier sums are brought to the new maximum.
  void softmax(int row, int columns, const ScoreForm& form) {
    for (int r = 0; r < strip; ++r) {
      const float* s_row = s + r * block_keys;
      const float* column = terms.columns_of(row + r);
      Vec left_max = splat(row_max[row + r]), right_max = left_max;
      for (int n = 0; n < columns; n += panel_columns) {
        left_max = max(left_max, score(form, s_row + n, column + n));
        right_max = max(right_max, score(form, s_row + n + lanes, column + n + lanes));
      }
      const float new_max =
          reduce(max(left_max, right_max), [](Vec a, Vec b) { return max(a, b); });
      // A row that has seen no key yet has no maximum; every p is then 0.
      const float subtracted = new_max == -infinity ? 0.0f : new_max;
      if (new_max > row_max[row + r]) rescale(row + r, row_max[row + r] - subtracted);
      row_max[row + r] = new_max;

      float* sum = row_sum + std::int64_t{row + r} * lanes;
      Vec total = load(sum);
      for (int n = 0; n < columns; n += panel_columns) {
        const Vec left = exp(score(form, s_row + n, column + n) - splat(subtracted));
        const Vec right =
            exp(score(form, s_row + n + lanes, column + n + lanes) - splat(subtracted));
        total = total + (left + right);
        store_probabilities(r, n, left, right);
      }
      store(sum, total);
    }
  }

  void store_probabilities(int r, int n, Vec left, Vec right) {
    if (out_shift != 0) {
      left = scaled(left, v_exponents + n, out_shift);
      right = scaled(right, v_exponents + n + lanes, out_shift);
    }
    Element::store_row(p + r * Shape<Element>::key_words, n, left, right);
  }

  // exp(old max - new max) times the sums of a row.
  void rescale(int row, float difference) {
    const Vec factor = exp(splat(difference));
    float* sum = row_sum + std::int64_t{row} * lanes;
    store(sum, load(sum) * factor);
    float* out_row = out + std::int64_t{row} * shape.head_columns;
    for (int d = 0; d < shape.head_columns; d += lanes) {
      store(out_row + d, load(out_row + d) * factor);
    }
  }

  void add_nonfinite_values(const Tile& tile, const KeyBlock& block, int visible,
                            Product out_rows) const {
    add_nonfinite<In>([this](int r, int n) { return Element::element(p, r * block_keys + n); },
                      key_rows<In>(t.v, tile.batch, tile.head, block), strip, visible, t.head_dim,
                      out_rows);
  }

  void finish(const Tile& tile) {
    const auto rows = tile_rows<In>(t, t.out, tile);
    for (int r = 0; r < tile.rows; ++r) {
      const float sum = reduce_add(load(row_sum + std::int64_t{r} * lanes));
      const bool empty = row_max[r] == -infinity;
      const float* from = out + std::int64_t{r} * shape.head_columns;
      const Vec factor = splat(empty ? 0.0f : 1.0f / sum);
      Storage* to = const_cast<Storage*>(rows(r));
      for (int d = 0; d < t.head_dim; d += lanes) {
        Vec value = load(from + d) * factor;
        if (out_shift != 0) value = value * splat(power_of_two(out_shift));
        if (t.saturate) value = saturated(value, In::largest);
        if (unknown[r]) value = splat(not_a_number);
        store_narrowed<In>(to + d, value, t.head_dim - d);
      }
      const std::int64_t head = tile.head * t.group + r % t.group;
      const std::int64_t index =
          (tile.batch * t.heads_kv * t.group + head) * t.seqlen_q + tile.first_query + r / t.group;
      const double log_sum = empty ? 0 : __builtin_log(static_cast<double>(sum));
      t.lse[index] = unknown[r] ? not_a_number : row_max[r] + static_cast<float>(log_sum);
      if (t.lse_low != nullptr) {
        const double rest = static_cast<double>(row_max[r]) - static_cast<double>(t.lse[index]);
        t.lse_low[index] = empty ? 0.0f : static_cast<float>(rest + log_sum);
      }
    }
  }
};

template <class In, class Element>
std::int64_t forward_scratch(const Task& task) {
  ScratchAllocator allocator(nullptr);
  const ForwardTask whole{task, {}, nullptr, nullptr};
  ForwardTile<In, Element> tile(whole, allocator);
  return allocator.used();
}

// Tiles of a head from last to first: under a causal mask the last one takes longest.
template <class In, class Element>
void forward_item(const ForwardTask& task, std::int64_t item, void* scratch) {
  const std::int64_t index = task.tiles - 1 - item % task.tiles;
  const std::int64_t head = item / task.tiles;
  ScratchAllocator allocator(scratch);
  ForwardTile<In, Element> tile(task, allocator);
  [[maybe_unused]] const typename Element::Session session;
  tile.run(Tile(task, head / task.heads_kv, head % task.heads_kv, index), index);
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
