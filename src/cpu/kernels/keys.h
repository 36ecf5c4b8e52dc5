#pragma once

#include <cstdint>

#include "cpu/kernels/element.h"
#include "cpu/task.h"

// The blocks of keys that a tile of queries visits, and the score terms that depend on the key alone.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

struct Tile {
  std::int64_t batch, head;  // of k and v
  // The batch of k, v, a bias and slots; another one where these have rows of their own, negative for none.
  std::int64_t key_batch;
  std::int64_t first_key = 0;  // in k, v and a bias, where the slots of heads follow each other
  std::int64_t first_query;
  int queries;
  int rows;                    // queries * G
  std::int64_t causal_offset;  // the last key that query i sees is i + causal_offset

  Tile(const Task& t, std::int64_t batch_, std::int64_t head_, std::int64_t tile)
      : batch(batch_),
        head(head_),
        key_batch(t.slots.rows == nullptr ? batch_ : t.slots.rows[batch_ * t.slots.rows_stride]),
        first_query(tile * t.tile_queries) {
    const std::int64_t left = t.seqlen_q - first_query;
    queries = left < t.tile_queries ? static_cast<int>(left) : t.tile_queries;
    rows = queries * static_cast<int>(t.group);
    causal_offset = t.seqlen_k - t.seqlen_q;
    for (std::int64_t h = 0; t.slots.windows != nullptr && h < head; ++h) {
      first_key += t.slots.windows[h] + t.slots.more_slots;
    }
  }
};

inline SlotCount& slot_count(const Task& t, const Tile& tile) {
  return t.slots.counts[tile.key_batch * t.slots.row_counts + tile.head];
}
// The first slot of a tile in `scores` and `positions`.
inline std::int64_t first_slot(const Task& t, const Tile& tile) {
  return tile.key_batch * t.slots.row_slots + tile.head * t.slots.stride + tile.first_key;
}

// Up to block_keys keys: index[0 .. count), or start, start + 1, ... where index is null.
struct KeyBlock {
  const std::int32_t* index = nullptr;
  std::int64_t start = 0;
  int count = 0;
  bool partial = false;  // some query of the tile does not see some key, so elements are tested

  std::int64_t key(int n) const { return index != nullptr ? index[n] : start + n; }
};

enum class KeySource : std::uint8_t { tile_list, all };

class KeyBlockIterator {
 public:
  KeyBlockIterator(const Task& t, const Tile& tile, std::int64_t tile_index, KeySource source) {
    const std::int64_t last = tile.first_query + tile.queries - 1;
    const QueryTileLists& lists = t.tile_lists;
    if (source == KeySource::tile_list && lists.begin != nullptr) {
      const std::int64_t list =
          tile.batch * lists.stride_batch + tile.head * lists.stride_head + tile_index;
      index_ = lists.keys + lists.begin[list];
      end_ = lists.count[list];
      full_ = lists.full[list];
      return;
    }
    end_ = t.seqlen_k;
    if (t.slots.counts != nullptr) {
      end_ = full_ = tile.key_batch < 0 ? 0 : slot_count(t, tile).count;
      return;
    }
    if (t.causal && last + tile.causal_offset + 1 < end_) end_ = last + tile.causal_offset + 1;
    full_ = t.causal ? tile.first_query + tile.causal_offset + 1 : t.seqlen_k;
    if (t.intervals.data != nullptr) full_ = 0;
  }

  bool next(KeyBlock& block) {
    if (position_ >= end_) return false;
    const std::int64_t left = end_ - position_;
    block.count = left < block_keys ? static_cast<int>(left) : block_keys;
    block.index = index_;
    block.start = position_;
    if (index_ != nullptr) index_ += block.count;
    position_ += block.count;
    block.partial = position_ > full_;
    return true;
  }

  // Restricts the iteration to part `part` of `parts`, each of about the same number of whole blocks.
  void take_part(int part, int parts) {
    const std::int64_t blocks = (end_ + block_keys - 1) / block_keys;
    const std::int64_t end = blocks * (part + 1) / parts * block_keys;
    const std::int64_t begin = blocks * part / parts * block_keys;
    if (index_ != nullptr) index_ += begin;
    position_ = begin;
    last_ = end_ - 1;
    if (end < end_) end_ = end;
  }

  // The i-th key after the last block, possibly in the next part; the last key of all where there are fewer.
  std::int64_t peek(int i) const {
    const std::int64_t last = last_ - position_;  // -1: the last key of the block
    const std::int64_t at = i < last ? i : last;
    return index_ != nullptr ? index_[at] : position_ + at;
  }

  // The range of the remaining keys.
  std::int64_t position() const { return position_; }
  std::int64_t end() const { return end_; }

 private:
  const std::int32_t* index_ = nullptr;  // the list from position_ on
  std::int64_t position_ = 0;
  std::int64_t end_ = 0;
  std::int64_t last_ = 0;  // key of all parts
  std::int64_t full_ = 0;  // every query sees the keys before this one
};

// The queries of a tile for which the biases of a block of keys count.
enum class BiasUse : std::uint8_t {
  all,   // every query; the rule without a delay
  some,  // delayed biases count for the queries from biases_begin on, and elements are tested
  none,
};

// Terms of the score that depend on the key alone, and the rows of the tile that see any key of the
// block. A key that is masked for every query has the column term -inf, and so do the columns after the
// block's last key.
struct KeyTerms {
  std::int32_t first[block_keys];  // query i sees key n when first[n] <= i < last[n]
  std::int32_t last[block_keys];
  float* columns;  // [column_heads, block_keys]; without the bias unless it counts for all queries
  int column_heads;  // 1, or G where the heads of a group differ
  BiasUse bias_use;
  float* delayed_biases;                  // [column_heads, block_keys]; of BiasUse::some
  std::int32_t biases_begin[block_keys];  // the first query for which key n's bias counts
  bool test_intervals;
  bool test_mask;
  bool some_large;         // a term in `columns` is large
  int row_begin, row_end;  // rows outside of this range see none of the keys

  const float* columns_of(int row) const {
    return columns + row % column_heads * std::int64_t{block_keys};
  }
  const float* delayed_biases_of(int row) const {
    return delayed_biases + row % column_heads * std::int64_t{block_keys};
  }
  bool empty() const { return row_begin >= row_end; }

  // Whether the biases of keys [n, n + lanes) count for a query.
  Int counts(std::int64_t query, int n) const {
    return load_as<Int>(biases_begin + n) <= Int{} + static_cast<std::int32_t>(query);
  }
};

// The number of leading keys of the block that some row up to `last_row` may see, which is less than its
// count on the diagonal of a causal mask.
inline int visible_keys(const Task& t, const Tile& tile, const KeyBlock& block, int last_row) {
  if (!t.causal || block.index != nullptr) return block.count;
  const int row = last_row < tile.rows ? last_row : tile.rows - 1;
  const std::int64_t visible =
      tile.first_query + row / t.group + tile.causal_offset + 1 - block.start;
  return visible < block.count ? static_cast<int>(visible) : block.count;
}

// The first row that sees key n of a block of consecutive keys under a causal mask; all later rows see it, too.
inline int first_row(const Task& t, const Tile& tile, const KeyBlock& block, int n) {
  if (!t.causal) return 0;
  const std::int64_t query = block.start + n - tile.causal_offset - tile.first_query;
  return query < 0 ? 0 : query < tile.queries ? static_cast<int>(query * t.group) : tile.rows;
}

inline const std::uint8_t* mask_at(const Task& t, const Tile& tile, int group_head,
                                   std::int64_t query) {
  return static_cast<const std::uint8_t*>(t.mask.data) + tile.batch * t.mask.batch +
         tile.head * t.mask.kv_head + group_head * t.mask.group_head + query * t.mask.query;
}

inline std::int64_t bias_at(const Task& t, const Tile& tile, int group_head, std::int64_t query) {
  return tile.key_batch * t.bias.batch + tile.head * t.bias.kv_head +
         group_head * t.bias.group_head + query * t.bias.query + tile.first_key;
}

// A key mask or bias is a column term; a dense one is tested element by element.
inline bool is_dense(const Term& term) { return term.data != nullptr && term.query != 0; }
inline bool is_per_key(const Term& term) { return term.data != nullptr && term.query == 0; }

inline int column_heads(const Task& t) {
  const bool differ = (is_per_key(t.bias) && t.bias.group_head != 0) ||
                      (is_per_key(t.mask) && t.mask.group_head != 0);
  return differ ? static_cast<int>(t.group) : 1;
}

// Where a term of a score is larger, the rounding of the score may be larger than 1 (score.h). A negative one, which has no
// weight next to others, is only large if its sum with scale q . k, below 2^126, could overflow.
inline constexpr float large_term = 0x1p24f;
inline constexpr float lowest_term = -0x1p100f;
inline Int is_large_term(Vec term) {
  return (term > splat(large_term)) | ((term < splat(lowest_term)) & (term > splat(-infinity)));
}

// A bias as it enters a score. A masking bias becomes -inf; with saturation, +inf becomes the largest number.
inline Vec bias_term(const Task& t, Vec bias) {
  const float largest = t.saturate ? float_max : infinity;
  return bias > splat(t.mask_value) ? min(bias, splat(largest)) : splat(-infinity);
}

// The bias of keys [n, n + lanes) of the block in the row that begins at `row`, 0 after the last key.
inline Vec load_bias(const Task& t, std::int64_t row, const KeyBlock& block, int n) {
  if (block.index == nullptr && t.bias.key == 1 && n + lanes <= block.count) {
    const std::int64_t at = row + block.start + n;
    switch (t.bias.dtype) {
      case DType::bf16:
        return load_widened<Bf16>(static_cast<const std::uint16_t*>(t.bias.data) + at, lanes);
      case DType::f16:
        return load_widened<F16>(static_cast<const std::uint16_t*>(t.bias.data) + at, lanes);
      default: return load_widened<F32>(static_cast<const float*>(t.bias.data) + at, lanes);
    }
  }
  Vec bias{};
  for (int i = 0; i < lanes && n + i < block.count; ++i) {
    bias[i] = load_scalar(t.bias.data, t.bias.dtype, row + block.key(n + i) * t.bias.key);
  }
  return bias;
}

inline void hide_empty_slots(const Task& t, const Tile& tile, const KeyBlock& block,
                             float* column) {
  const SlotCount& count = slot_count(t, tile);
  if (count.free == count.count) return;
  constexpr std::int32_t empty = -0x7fffffff - 1;  // no_key
  const std::int32_t* entries = t.slots.positions + first_slot(t, tile);
  for (int n = 0; n < block.count; ++n) {
    if (entries[block.key(n)] == empty) column[n] = -infinity;
  }
}

inline BiasUse bias_use(const Task& t, const Tile& tile, const KeyBlock& block) {
  if (t.bias_delay == 0) return BiasUse::all;
  std::int64_t first_key = block.key(0);
  std::int64_t last_key = block.key(block.count - 1);
  for (int n = 0; block.index != nullptr && n < block.count; ++n) {
    if (block.index[n] < first_key) first_key = block.index[n];
    if (block.index[n] > last_key) last_key = block.index[n];
  }
  const std::int64_t position = tile.first_query + tile.causal_offset;
  if (position - last_key >= t.bias_delay) return BiasUse::all;
  return position + tile.queries - 1 - first_key < t.bias_delay ? BiasUse::none : BiasUse::some;
}

// The first query for which the bias of a key counts; seqlen_q if there is none.
inline std::int32_t bias_begin(const Task& t, const Tile& tile, std::int64_t key) {
  const std::int64_t position = t.seqlen_q - 1 + tile.causal_offset;  // of the last query
  const bool counts = position - key >= t.bias_delay;
  return static_cast<std::int32_t>(counts ? key + t.bias_delay - tile.causal_offset : t.seqlen_q);
}

inline void column_terms(const Task& t, const Tile& tile, const KeyBlock& block, KeyTerms& terms) {
  for (int n = 0; terms.bias_use == BiasUse::some && n < block_keys; ++n) {
    const bool exists = n < block.count;
    terms.biases_begin[n] = exists ? bias_begin(t, tile, block.key(n)) : 0;
  }
  for (int g = 0; g < terms.column_heads; ++g) {
    float* column = terms.columns + std::int64_t{g} * block_keys;
    float* delayed = terms.delayed_biases + std::int64_t{g} * block_keys;
    const bool with_bias = is_per_key(t.bias) && terms.bias_use != BiasUse::none;
    const std::int64_t bias = bias_at(t, tile, g, 0);
    Int large{};
    for (int n = 0; n < block_keys; n += lanes) {
      Vec term{};
      if (with_bias) {
        term = bias_term(t, load_bias(t, bias, block, n));
        large |= is_large_term(term);
        if (terms.bias_use == BiasUse::some) {
          store(delayed + n, term);
          term = Vec{};
        }
      }
      store(column + n, lane_numbers() + n < block.count ? term : splat(-infinity));
    }
    if (t.slots.counts != nullptr) hide_empty_slots(t, tile, block, column);
    if (is_per_key(t.mask)) {
      const std::uint8_t* mask = mask_at(t, tile, g, 0);
      for (int n = 0; n < block.count; ++n) {
        if (mask[block.key(n) * t.mask.key] == 0) column[n] = -infinity;
      }
    }
    if (!any(large)) continue;
    for (int n = 0; n < block_keys; n += lanes) {  // without those that are hidden now
      terms.some_large = terms.some_large || any(is_large_term(load(column + n)));
    }
  }
}

inline void interval_terms(const Task& t, const Tile& tile, const KeyBlock& block,
                           KeyTerms& terms) {
  const KeyInterval* intervals = t.intervals.data == nullptr
                                     ? nullptr
                                     : t.intervals.data + tile.batch * t.intervals.stride_batch +
                                           tile.head * t.intervals.stride_head;
  std::int64_t begin = tile.first_query + tile.queries;
  std::int64_t end = tile.first_query;
  for (int n = 0; n < block.count; ++n) {
    const std::int64_t key = block.key(n);
    std::int64_t first = intervals == nullptr ? 0 : intervals[key].first;
    const std::int64_t last = intervals == nullptr ? t.seqlen_q : intervals[key].last;
    if (t.causal && key - tile.causal_offset > first) first = key - tile.causal_offset;
    terms.first[n] = static_cast<std::int32_t>(first < t.seqlen_q ? first : t.seqlen_q);
    terms.last[n] = static_cast<std::int32_t>(last);
    if (first >= last) continue;
    if (first < begin) begin = first;
    if (last > end) end = last;
  }
  for (int n = block.count; n < block_keys; ++n) terms.first[n] = terms.last[n] = 0;
  const std::int64_t low = begin > tile.first_query ? begin - tile.first_query : 0;
  const std::int64_t high =
      end - tile.first_query < tile.queries ? end - tile.first_query : tile.queries;
  terms.row_begin = static_cast<int>(low * t.group);
  terms.row_end = static_cast<int>(high * t.group);
}

struct MaskContent {
  bool some_visible = false;
  bool some_masked = false;

  void add(const std::uint8_t* mask, const KeyBlock& block, std::int64_t stride) {
    std::uint8_t all = 1;
    std::uint8_t some = 0;
    if (block.index == nullptr && stride == 1) {
      for (int n = 0; n < block.count; ++n) {
        const std::uint8_t visible = mask[block.start + n] != 0;
        all = all & visible;
        some = some | visible;
      }
    } else {
      for (int n = 0; n < block.count; ++n) {
        const std::uint8_t visible = mask[block.key(n) * stride] != 0;
        all = all & visible;
        some = some | visible;
      }
    }
    some_visible = some_visible || some != 0;
    some_masked = some_masked || all == 0;
  }
};

// Reads the tile of a dense mask, so that an empty tile costs nothing more and a full one needs no tests.
inline void mask_terms(const Task& t, const Tile& tile, const KeyBlock& block, KeyTerms& terms) {
  const int group = static_cast<int>(t.group);
  MaskContent content;
  for (int g = 0; g < (t.mask.group_head != 0 ? group : 1); ++g) {
    for (int i = terms.row_begin / group; i < (terms.row_end + group - 1) / group; ++i) {
      content.add(mask_at(t, tile, g, tile.first_query + i), block, t.mask.key);
      if (content.some_visible && content.some_masked) {
        terms.test_mask = true;
        return;
      }
    }
  }
  if (!content.some_visible) terms.row_end = terms.row_begin;
}

inline void prepare_terms(const Task& t, const Tile& tile, const KeyBlock& block, KeyTerms& terms) {
  terms.column_heads = column_heads(t);
  terms.bias_use = bias_use(t, tile, block);
  terms.row_begin = 0;
  terms.row_end = tile.rows;
  terms.test_intervals = block.partial;
  terms.test_mask = false;
  terms.some_large = false;
  if (block.partial) interval_terms(t, tile, block, terms);
  if (!terms.empty() && is_dense(t.mask)) mask_terms(t, tile, block, terms);
  if (!terms.empty()) column_terms(t, tile, block, terms);
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
