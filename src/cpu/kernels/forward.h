#pragma once

#include <cstdint>

#include "cpu/kernels/key_factors.h"
#include "cpu/kernels/keys.h"
#include "cpu/kernels/magnitude.h"
#include "cpu/kernels/multiply.h"
#include "cpu/kernels/online_softmax.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/score.h"
#include "cpu/kernels/scratch.h"
#include "cpu/task.h"

// The forward. One item is a tile of queries of one kv head, with all heads of its group stacked. For each
// block of keys and each strip of rows it computes s = q k^T, the online softmax, and out += p v
// (Dao, arXiv 2307.08691).
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

template <class In, class Element>
struct ForwardTile {
  static constexpr int strip = Element::strip_rows;
  using Storage = typename In::Storage;

  const ForwardTask& t;
  const Shape<Element> shape;
  Factor q;
  ForwardKeys<In, Element> own_keys;  // packed by this tile
  ForwardKeys<In, Element> keys;      // the current block
  float* s;                           // [strip, block_keys]
  float* p;                           // [strip, key_words] words; s itself where a word is an fp32
  OnlineSoftmax softmax;
  Storage* staged;
  std::int32_t* q_exponents;  // [padded_rows]
  std::int32_t* k_exponents;  // [block_keys]
  std::int32_t* v_exponents;  // [block_keys]
  KeyTerms terms;
  bool q_large = false;

  ForwardTile(const ForwardTask& task, ScratchAllocator& allocator)
      : t(task),
        shape(task),
        q(shape.take_row_major(allocator)),
        own_keys(task, allocator),
        keys(own_keys),
        s(allocator.take<float>(strip * block_keys)),
        p(Element::per_word == 1 ? s : allocator.take<float>(strip * Shape<Element>::key_words)),
        softmax(task, shape.padded_rows, allocator) {
    staged = allocator.take<Storage>(
        std::int64_t{shape.rows > block_keys ? shape.rows : block_keys} * t.head_dim);
    q_exponents = allocator.take<std::int32_t>(shape.padded_rows);
    k_exponents = allocator.take<std::int32_t>(block_keys);
    v_exponents = allocator.take<std::int32_t>(block_keys);
    take_columns(t, allocator, terms);
  }

  void run(const Tile& tile, std::int64_t tile_index) {
    load_queries(tile);
    softmax.clear();
    KeyBlock block;
    for (KeyBlockIterator blocks(t, tile, tile_index, KeySource::tile_list); blocks.next(block);) {
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
                     t.saturate ? nullptr : softmax.unknown);
        }
        softmax.add_scores(
            row, strip, columns, {t.scale, general}, terms, s,
            [&](int r, int n, Vec left, Vec right) { store_probabilities(r, n, left, right); });
        const Product out_rows{softmax.out_row(row), softmax.head_columns};
        if (keys.large->v != 0) add_nonfinite_values(tile, block, row, visible, out_rows);
        multiply<Element, Layout::row_major, Store::add>({p, Shape<Element>::key_words}, keys.v,
                                                         out_rows, strip, softmax.head_columns,
                                                         depth_words<Element>(visible));
      }
    }
    softmax.template finish<In>(tile, tile_rows<In>(t, t.out, tile));
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
  }

  // Sets `keys` to the factors of the block and returns the factor of its scores.
  ScoreExponents load_keys(const Tile& tile, const KeyBlock& block) {
    ScoreExponents exponents;
    if (q_large) exponents.queries = q_exponents;
    for (int n = 0; n < block_keys; ++n) v_exponents[n] = 0;
    if (t.packed_keys != nullptr) {
      keys = shared_keys<ForwardKeys<In, Element>>(t, tile.batch, tile.head, block.start);
      if (!keys.large->any()) return exponents;
    }
    keys = own_keys;
    const auto k_rows = key_rows<In>(t.k, tile.batch, tile.head, block);
    const auto v_rows = key_rows<In>(t.v, tile.batch, tile.head, block);
    keys.pack(t, k_rows, v_rows, block.count);
    if (keys.large->k != 0) {
      for (int n = block.count; n < block_keys; ++n) k_exponents[n] = 0;
      stage_rows<In>(k_rows, block.count, t.head_dim, NonFiniteInput::keep, staged, k_exponents);
      pack_transposed<In, Element>(staged_rows(staged, t.head_dim), block.count, t.head_dim,
                                   keys.k);
      exponents.keys = k_exponents;
    }
    if (keys.large->v != 0) {
      stage_rows<In>(v_rows, block.count, t.value_dim, NonFiniteInput::drop, staged, v_exponents);
      pack_panels<In, Element>(staged_rows(staged, t.value_dim), block.count,
                               padded_depth<Element>(block.count), t.value_dim, keys.v);
      softmax.use_large_unit();
    }
    return exponents;
  }

  void store_probabilities(int r, int n, Vec left, Vec right) {
    if (const int shift = *softmax.out_shift; shift != 0) {
      left = scaled(left, v_exponents + n, shift);
      right = scaled(right, v_exponents + n + lanes, shift);
    }
    Element::store_row(p + r * Shape<Element>::key_words, n, left, right);
  }

  void add_nonfinite_values(const Tile& tile, const KeyBlock& block, int row, int visible,
                            Product out_rows) const {
    const auto probability = [this](int r, int n) {
      return Element::element(p, r * block_keys + n);
    };
    add_nonfinite<In>(
        probability,
        [&](int r, int n) {
          return t.saturate ? probability(r, n) != 0 : sees(t, tile, block, terms, row + r, n);
        },
        key_rows<In>(t.v, tile.batch, tile.head, block), strip, visible, t.value_dim, out_rows);
  }
};

template <class In, class Element>
std::int64_t forward_scratch(const Task& task) {
  ScratchAllocator allocator(nullptr);
  const ForwardTask whole{task};
  ForwardTile<In, Element> tile(whole, allocator);
  return allocator.used();
}

// The tiles of a head run from last to first, because the last one takes longest under a causal mask.
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
