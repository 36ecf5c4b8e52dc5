#pragma once

#include "cuda/kv_cache/slots.cuh"

// Bodies of for_each, whose items are units of rows.
namespace flash_dmattn::cuda::kv {

// An item's unit of a row, and the row: number `place` of those of head `h` of batch element `b`.
struct RowUnit {
  int unit;
  int place;
  int h;
  int b;

  __device__ RowUnit(long item, const RowCopy& copy, int places, int heads)
      : unit(static_cast<int>(item % copy.units)),
        place(static_cast<int>(item / copy.units % places)),
        h(static_cast<int>(item / copy.units / places % heads)),
        b(static_cast<int>(item / copy.units / places / heads)) {}
};

struct ClearRows {
  Slots cache;
  RowCopy copy;

  __device__ void operator()(long item) const {
    const auto [unit, slot, h, b] = RowUnit(item, copy, cache.slots, cache.heads);
    const int row = cache.rows(b);
    if (row < 0) return;
    const auto clear = [&](const WrittenRows& rows) {
      std::byte* const to = rows.at(row, h, slot) + unit * copy.unit;
      for (int i = 0; i < copy.unit; i += 2) *reinterpret_cast<std::uint16_t*>(to + i) = 0;
    };
    clear(cache.k);
    if (unit < copy.value_units) clear(cache.v);
    if (unit > 0) return;
    const std::int64_t at = cache.first(row, h) + slot;
    cache.scores[at] = 0;
    cache.entries[at] = 0;
    if (slot > 0) return;
    cache.count(row, h) = {};
    if (h == 0) cache.seen_of(row) = 0;
  }
};

// Copies a row of `from`, by the index of the call, to row b of `to`.
struct CopyRows {
  Slots from, to;
  RowCopy copy;

  __device__ void operator()(long item) const {
    const auto [unit, slot, h, b] = RowUnit(item, copy, to.places + to.pending, to.heads);
    const int to_row = to.rows(b);
    const int from_row = from.rows(b);
    if (to_row < 0 || from_row < 0) return;
    const SlotCount count = from.count(from_row, h);
    if (slot >= count.count && slot < to.places && slot > 0) return;
    copy.k(to.k.at(to_row, h, slot), from.k.at(from_row, h, slot), unit);
    copy.v(to.v.at(to_row, h, slot), from.v.at(from_row, h, slot), unit);
    if (unit > 0) return;
    const std::int64_t at = to.first(to_row, h) + slot;
    const std::int64_t from_at = from.first(from_row, h) + slot;
    to.scores[at] = from.scores[from_at];
    to.entries[at] = from.entries[from_at];
    if (slot > 0) return;
    to.count(to_row, h) = count;
    if (h == 0) to.seen_of(to_row) = from.seen_of(from_row);
  }
};

// Writes tokens after the pending tokens.
struct AppendTokens {
  Slots cache;
  ReadRows k, v;
  TokenScores scores;
  CacheRule rule;
  int seqlen;
  RowCopy copy;

  __device__ void operator()(long item) const {
    const auto [unit, t, h, b] = RowUnit(item, copy, seqlen, cache.heads);
    const int slot = cache.places + cache.pending + t;
    copy.k(cache.k.at(b, h, slot), k.at(b, h, t), unit);
    copy.v(cache.v.at(b, h, slot), v.at(b, h, t), unit);
    if (unit > 0) return;
    const std::int64_t at = cache.first(b, h) + slot;
    const float score = scores(b, h, t);
    const std::int32_t position = cache.seen[b] + cache.pending + t;
    const std::int32_t entry = rule.head_rule(h).admits(score) ? position : ~position;
    cache.scores[at] = score;
    cache.entries[at] = scores.is_present(b, t) ? entry : no_key;
  }
};

// Copies the rows of pending tokens to their slots.
struct MoveTokens {
  Slots cache;
  const std::int32_t* destinations;  // [B, Hkv, pending], -1: none
  RowCopy copy;

  __device__ void operator()(long item) const {
    const std::int32_t to = destinations[item / copy.units];
    if (to < 0) return;
    const auto [unit, t, h, b] = RowUnit(item, copy, cache.pending, cache.heads);
    const int from = cache.places + t;
    copy.k(cache.k.at(b, h, to), cache.k.at(b, h, from), unit);
    copy.v(cache.v.at(b, h, to), cache.v.at(b, h, from), unit);
  }
};

// Copies the rows of the tokens that have slots, according to the positions in the slots.
struct FillRows {
  Slots cache;
  ReadRows k, v;
  RowCopy copy;

  __device__ void operator()(long item) const {
    const auto [unit, slot, h, b] = RowUnit(item, copy, cache.places, cache.heads);
    const int row = cache.rows(b);
    if (row < 0 || slot >= cache.count(row, h).count) return;
    const std::int32_t t = position_of_entry(cache.entries[cache.first(row, h) + slot]);
    copy.k(cache.k.at(row, h, slot), k.at(b, h, t), unit);
    copy.v(cache.v.at(row, h, slot), v.at(b, h, t), unit);
  }
};

}  // namespace flash_dmattn::cuda::kv
