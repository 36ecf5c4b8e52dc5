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
  const ForwardTask& t;
  const Shape<Element> shape;
  Factor q;
  ForwardKeys<In, Element> keys;  // the current block
  float* s;                       // [strip, block_keys]
  float* row_terms;               // the same
  float* p;                       // [strip, key_words] words; s itself where a word is an fp32
  OnlineSoftmax softmax;
  KeyTerms terms;
  Numbers q_numbers = Numbers::ordinary;

  ForwardTile(const ForwardTask& task, ScratchAllocator& allocator)
      : t(task),
        shape(task),
        q(shape.take_row_major(allocator)),
        keys(task, allocator),
        s(allocator.take<float>(strip * block_keys)),
        row_terms(allocator.take<float>(strip * block_keys)),
        p(Element::per_word == 1 ? s : allocator.take<float>(strip * Shape<Element>::key_words)),
        softmax(task, shape.padded_rows, allocator) {
    take_columns(t, allocator, terms);
  }

  void run(const Tile& tile, std::int64_t tile_index) {
    load_queries(tile);
    softmax.clear();
    KeyBlock block;
    for (KeyBlockIterator blocks(t, tile, tile_index, KeySource::tile_list); blocks.next(block);) {
      prepare_terms(t, tile, block, terms);
      if (terms.empty()) continue;
      load_keys(tile, block);
      for (int row = terms.row_begin / strip * strip; row < terms.row_end; row += strip) {
        const int visible = visible_keys(t, tile, block, row + strip - 1);
        const int columns = round_up(visible, panel_columns);
        multiply<Element, Layout::row_major, Store::replace>(
            {q.words + std::int64_t{row} * q.ld, q.ld}, keys.k, {s, block_keys}, strip, columns,
            shape.head_words);
        const StripScores scores =
            make_scores(t, tile, block, terms, larger(q_numbers, keys.numbers->k), row, strip,
                        columns, s, row_terms, nullptr, t.saturate ? nullptr : softmax.unknown);
        softmax.add_scores(scores, strip, columns, [&](int r, int n, Vec left, Vec right) {
          Element::store_row(p + r * Shape<Element>::key_words, n, left, right);
        });
        const Product out_rows{softmax.out_row(row), softmax.head_columns};
        if (keys.numbers->v == Numbers::nonfinite) {
          add_nonfinite_values(tile, block, scores, visible);
        }
        multiply<Element, Layout::row_major, Store::add>({p, Shape<Element>::key_words}, keys.v,
                                                         out_rows, strip, softmax.head_columns,
                                                         depth_words<Element>(visible));
      }
    }
    softmax.template finish<In>(tile, tile_rows<In>(t, t.out, tile));
  }

  void load_queries(const Tile& tile) {
    q_numbers =
        numbers_of(pack_rows<In, Element>(tile_rows<In>(t, t.q, tile), tile.rows, shape.padded_rows,
                                          t.head_dim, const_cast<float*>(q.words), shape.head_ld));
  }

  // Sets `keys` to the factors of the block.
  void load_keys(const Tile& tile, const KeyBlock& block) {
    if (t.packed_keys != nullptr) {
      keys = shared_keys<ForwardKeys<In, Element>>(t, tile.batch, tile.head, block.start);
    } else {
      keys.pack(t, key_rows<In>(t.k, tile.batch, tile.head, block),
                key_rows<In>(t.v, tile.batch, tile.head, block), block.count);
    }
  }

  void add_nonfinite_values(const Tile& tile, const KeyBlock& block, const StripScores& scores,
                            int visible) const {
    const auto probability = [this](int r, int n) {
      return Element::element(p, r * block_keys + n);
    };
    add_nonfinite<In>(
        probability,
        [&](int r, int n) { return t.saturate ? probability(r, n) != 0 : scores.sees(r, n); },
        key_rows<In>(t.v, tile.batch, tile.head, block), strip, visible, t.value_dim,
        [&](int r) { return softmax.out_row(scores.row + r); });
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
