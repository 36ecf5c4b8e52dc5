#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/kv_cache/views.h"
#include "cpu/selection/rank.h"

namespace flash_dmattn::cpu {

// The slots of a (batch, kv head), in row `row` of the arrays.
struct CacheRow {
  const KvCache& cache;
  std::int64_t b, h;
  std::int64_t row;
  HeadRule rule;
  HeadSlots slots;
  std::int64_t places;
  SlotCount& count;
  float* scores;
  std::int32_t* entries;

  CacheRow(const KvCache& c, std::int64_t b_, std::int64_t h_, std::int64_t row_)
      : cache(c),
        b(b_),
        h(h_),
        row(row_),
        rule(rule_of_head(c.shape, h)),
        slots(head_slots(c.shape, h)),
        places(slots.places),
        count(c.counts[row * c.rows.count_stride + h]),
        scores(c.scores + first_slot()),
        entries(c.positions + first_slot()) {}

  std::int64_t first_slot() const { return row * cache.rows.slot_stride + slots.first; }
  std::int32_t seen() const { return seen_of(cache, row); }

  char* address(const Tensor4& t, std::int64_t slot) const {
    const std::int64_t at =
        row * t.stride[0] + h * t.stride[1] + (slots.rows_before + slot) * t.stride[2];
    return static_cast<char*>(t.data) + at * size_of(cache.shape.dtype);
  }

  // The row of token t in a tensor [B, S, Hkv, D].
  const char* token(const ConstTensor4& tensor, std::int64_t t) const {
    const std::int64_t at = b * tensor.stride[0] + t * tensor.stride[1] + h * tensor.stride[2];
    return static_cast<const char*>(tensor.data) + at * size_of(cache.shape.dtype);
  }
  float token_score(const ScoreRows& s, std::int64_t t) const {
    return s.data[b * s.stride[0] + h * s.stride[1] + t * s.stride[2]];
  }
  bool is_present(const TokenMask& mask, std::int64_t t) const {
    return mask.data == nullptr || mask.data[b * mask.stride[0] + t * mask.stride[1]] != 0;
  }

  std::size_t key_bytes() const {
    return static_cast<std::size_t>(cache.shape.head_dim * size_of(cache.shape.dtype));
  }
  std::size_t value_bytes() const {
    return static_cast<std::size_t>(value_dim_of(cache.shape) * size_of(cache.shape.dtype));
  }

  void put(std::int64_t slot, const char* k, const char* v, float score, std::int32_t entry) const {
    std::memcpy(address(cache.k, slot), k, key_bytes());
    std::memcpy(address(cache.v, slot), v, value_bytes());
    scores[slot] = score;
    entries[slot] = entry;
  }

  // Copies a slot of `from`, which may be this row.
  void copy(std::int64_t slot, const CacheRow& from, std::int64_t source) const {
    put(slot, from.address(from.cache.k, source), from.address(from.cache.v, source),
        from.scores[source], from.entries[source]);
  }

  NarrowRank rank(std::int64_t slot) const { return rank_of(scores[slot], entries[slot]); }

  // Whether the key in a slot competes among the first `tokens` tokens.
  bool competes(std::int64_t slot, std::int32_t tokens) const {
    return 0 <= entries[slot] && entries[slot] < tokens - rule.delay();
  }

  // Finds the victim among the first `tokens` tokens.
  void find_victim(std::int32_t tokens) const {
    std::int32_t worst = -1;
    for (std::int32_t slot = 0; slot < count.count; ++slot) {
      if (competes(slot, tokens) && (worst < 0 || rank(slot) < rank(worst))) worst = slot;
    }
    if (worst >= 0) set_victim(worst);
  }
  void set_victim(std::int32_t slot) const {
    count.victim = slot;
    count.victim_score = scores[slot];
    count.victim_position = entries[slot];
  }

  // Finds the first slot without a key, and the oldest recent key after `tokens` tokens.
  void find_leaving(std::int32_t tokens) const {
    count.free = count.count;
    count.leaving = -1;
    if (rule.recent == 0) return;  // without recent keys no key leaves, and no slot becomes free
    const std::int32_t position = tokens - rule.recent;
    std::int32_t free = count.count;
    std::int32_t leaving = -1;
    for (std::int32_t slot = rule.sinks; slot < count.count; ++slot) {
      const std::int32_t entry = entries[slot];
      free = entry == no_key && slot < free ? slot : free;
      leaving = entry == position || entry == ~position ? slot : leaving;
    }
    if (position < 0) leaving = -1;
    count.free = free;
    count.leaving = leaving;
    if (leaving < 0) return;
    count.leaving_score =
        entries[leaving] < 0 ? std::numeric_limits<float>::quiet_NaN() : scores[leaving];
  }
};

}  // namespace flash_dmattn::cpu
