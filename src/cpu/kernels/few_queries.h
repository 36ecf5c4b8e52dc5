#pragma once

#include <cstdint>

#include "cpu/kernels/keys.h"
#include "cpu/kernels/magnitude.h"
#include "cpu/kernels/online_softmax.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/row_products.h"
#include "cpu/kernels/score.h"
#include "cpu/kernels/scratch.h"
#include "cpu/kernels/worst_slot.h"
#include "cpu/task.h"

// Forward of few queries (flash decoding), bound by memory bandwidth: k and v are read once for all heads of a group. The
// keys of a tile are split over work items, each with its own sums. The worker that finishes the last split of a tile
// merges the sums in order.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// The results of a split, until they are merged.
struct SplitSums {
  OnlineSoftmax softmax;
  WorstSlot* worst;  // worst slot of the split, if keys are slots

  SplitSums(const ForwardTask& t, ScratchAllocator& allocator)
      : softmax(t, t.tile_queries * static_cast<int>(t.group), allocator),
        worst(allocator.take<WorstSlot>(1)) {}
};

inline std::int64_t split_bytes(const ForwardTask& t) {
  ScratchAllocator allocator(nullptr);
  SplitSums(t, allocator);
  return allocator.used();
}

inline SplitSums split_sums(const ForwardTask& t, std::int64_t item) {
  ScratchAllocator allocator(t.split_sums + item * t.split_bytes);
  return SplitSums(t, allocator);
}

template <class In, class Element>
struct FewQueries {
  using Storage = typename In::Storage;

  const ForwardTask& t;
  const int rows;
  const int head_columns;  // of values
  const int q_ld;          // words
  float* q;                // [rows, q_ld] words
  float* s;                // [rows, block_keys], and p
  float* row_terms;        // the same
  float* before;           // [rows, head_columns]: out before the current block
  Storage* staged;         // [block_keys, value_dim]: values without inf and NaN
  KeyTerms terms;
  Numbers q_numbers = Numbers::ordinary;

  FewQueries(const ForwardTask& task, ScratchAllocator& allocator)
      : t(task),
        rows(task.tile_queries * static_cast<int>(task.group)),
        head_columns(round_up(task.value_dim, lanes)),
        q_ld(round_up(depth_words<Element>(task.head_dim), lanes)) {
    q = allocator.take<float>(std::int64_t{rows} * q_ld);
    s = allocator.take<float>(std::int64_t{rows} * block_keys);
    row_terms = allocator.take<float>(std::int64_t{rows} * block_keys);
    before = allocator.take<float>(std::int64_t{rows} * head_columns);
    staged = allocator.take<Storage>(std::int64_t{block_keys} * t.value_dim);
    take_columns(t, allocator, terms);
  }

  void run(const Tile& tile, KeyBlockIterator blocks, const OnlineSoftmax& softmax) {
    softmax.clear();
    q_numbers = numbers_of(
        pack_rows<In, Element>(tile_rows<In>(t, t.q, tile), tile.rows, rows, t.head_dim, q, q_ld));
    for (KeyBlock block; blocks.next(block);) {
      prepare_terms(t, tile, block, terms);
      if (terms.empty()) continue;
      const int visible = visible_keys(t, tile, block, tile.rows - 1);
      const int columns = round_up(visible, 2 * lanes);
      const auto keys = addresses(t.k, tile, block, visible, blocks);
      const auto values = addresses(t.v, tile, block, visible, blocks);
      multiply_keys<In, Element, RowsIn::memory>(q, q_ld, tile.rows, keys, visible, columns,
                                                 t.head_dim, s);
      const StripScores scores = make_scores(
          t, tile, block, terms, score_numbers(tile.rows, keys, visible, columns), 0, tile.rows,
          columns, s, row_terms, nullptr, t.saturate ? nullptr : softmax.unknown);
      softmax.add_scores(scores, tile.rows, columns, [this](int r, int n, Vec left, Vec right) {
        store(s + r * block_keys + n, left);
        store(s + r * block_keys + n + lanes, right);
      });
      multiply_values_of(tile, scores, values, visible, softmax);
    }
  }

 private:
  // The class of q . k; nonfinite only if q or k is.
  Numbers score_numbers(int count, const RowAddresses<Storage>& keys, int visible,
                        int columns) const {
    const Numbers numbers = numbers_of(s, count, columns, block_keys);
    if (numbers != Numbers::nonfinite || q_numbers == Numbers::nonfinite) return numbers;
    Int magnitude{};
    for (int n = 0; n < visible; ++n) {
      for (int d = 0; d < t.head_dim; d += lanes) {
        const Vec elements = load_widened<In>(keys(n) + d, t.head_dim - d);
        magnitude = larger(magnitude, bits(elements) & 0x7fffffff);
      }
    }
    return larger(numbers_of(magnitude), Numbers::large);
  }

  // Row addresses of a block of k or v and of the first rows of the block after it.
  RowAddresses<Storage> addresses(const Rows& array, const Tile& tile, const KeyBlock& block,
                                  int visible, const KeyBlockIterator& blocks) const {
    const auto* first = static_cast<const Storage*>(array.data) + tile.key_batch * array.batch +
                        tile.head * array.head + tile.first_key * array.row;
    return {[first, &array, &block](int n) { return first + block.key(n) * array.row; }, visible,
            [&](int i) { return first + blocks.peek(i) * array.row; }};
  }

  // out += p v. Sums that are inf or NaN are computed again from values without them.
  void multiply_values_of(const Tile& tile, const StripScores& scores,
                          const RowAddresses<Storage>& values, int visible,
                          const OnlineSoftmax& softmax) {
    const auto multiply_rows = [&](const RowAddresses<Storage>& rows_of_values) {
      multiply_values<In>(s, block_keys, tile.rows, rows_of_values, visible, t.value_dim,
                          softmax.out, head_columns);
    };
    const auto bytes = sizeof(float) * static_cast<std::size_t>(tile.rows) *
                       static_cast<std::size_t>(head_columns);
    __builtin_memcpy(before, softmax.out, bytes);
    multiply_rows(values);
    if (numbers_of(softmax.out, tile.rows, head_columns, head_columns) != Numbers::nonfinite) {
      return;
    }
    __builtin_memcpy(softmax.out, before, bytes);
    for (int n = 0; n < visible; ++n) {
      for (int d = 0; d < t.value_dim; d += lanes) {
        const Vec elements = finite_or_zero(load_widened<In>(values(n) + d, t.value_dim - d));
        store_narrowed<In>(staged + std::int64_t{n} * t.value_dim + d, elements, t.value_dim - d);
      }
    }
    const auto probability = [this](int r, int n) { return s[r * block_keys + n]; };
    add_nonfinite<In>(
        probability,
        [&](int r, int n) { return t.saturate ? probability(r, n) != 0 : scores.sees(r, n); },
        values, tile.rows, visible, t.value_dim, [&](int r) { return softmax.out_row(r); });
    // Prefetches after the last row repeat row 0.
    const auto* const finite_values = staged;
    multiply_rows({[&](int n) { return finite_values + std::int64_t{n} * t.value_dim; }, visible,
                   [&](int) { return finite_values; }});
  }
};

template <class In, class Element>
std::int64_t few_queries_scratch(const ForwardTask& t) {
  ScratchAllocator allocator(nullptr);
  FewQueries<In, Element>(t, allocator);
  return allocator.used();
}

struct SplitItem {
  std::int64_t tile_index;
  int split;
  Tile tile;

  SplitItem(const ForwardTask& t, std::int64_t item)
      : tile_index(item / t.splits % t.tiles),
        split(static_cast<int>(item % t.splits)),
        tile(t, item / t.splits / t.tiles / t.heads_kv, item / t.splits / t.tiles % t.heads_kv,
             tile_index) {}
};

template <class In, class Element>
void few_queries_item(const ForwardTask& t, std::int64_t item, void* scratch) {
  const SplitItem at(t, item);
  const SplitSums sums = split_sums(t, item);
  ScratchAllocator allocator(scratch);
  KeyBlockIterator blocks(t, at.tile, at.tile_index, KeySource::tile_list);
  blocks.take_part(at.split, t.splits);
  if (t.slots.scores != nullptr && at.tile.key_batch >= 0) {
    *sums.worst = worst_slot(t, at.tile, blocks);
  }
  FewQueries<In, Element>(t, allocator).run(at.tile, blocks, sums.softmax);
}

// Items are tiles.
template <class In>
void merge_splits(const ForwardTask& t, std::int64_t item) {
  const SplitItem at(t, item * t.splits);
  const SplitSums first = split_sums(t, item * t.splits);
  const bool has_victim = t.slots.scores != nullptr && at.tile.key_batch >= 0;
  for (int split = 1; split < t.splits; ++split) {
    const SplitSums other = split_sums(t, item * t.splits + split);
    first.softmax.merge(other.softmax);
    if (has_victim) *first.worst = worse(*first.worst, *other.worst);
  }
  first.softmax.template finish<In>(at.tile, tile_rows<In>(t, t.out, at.tile));
  if (has_victim) {
    SlotCount& count = slot_count(t, at.tile);
    count.victim = first.worst->slot;
    count.victim_score = first.worst->score;
    count.victim_position = first.worst->position;
  }
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
