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

// An item's unit of a slot. Items are those of the first `slots` slots of each head. If heads have different numbers of
// slots, they are those of every slot of a row, and there is one for each head at least.
struct SlotUnit {
  int unit;
  int slot;  // of head `h`; -1: none
  int h;
  int b;
  int counted;  // the head whose count this item changes, if unit is 0; -1: none

  __device__ SlotUnit(long item, const RowCopy& copy, const Slots& cache, int slots)
      : unit(static_cast<int>(item % copy.units)) {
    const long at = item / copy.units;
    if (!cache.rule.by_head) {
      slot = static_cast<int>(at % slots);
      h = static_cast<int>(at / slots % cache.heads);
      b = static_cast<int>(at / slots / cache.heads);
      counted = slot == 0 ? h : -1;
      return;
    }
    const int total = cache.rule.first_slots[cache.heads];
    const int row_items = max(total, cache.heads);
    const int number = static_cast<int>(at % row_items);
    b = static_cast<int>(at / row_items);
    h = head_at(cache.rule.first_slots, cache.heads, number);
    slot = number < total ? number - cache.rule.first_slots[h] : -1;
    counted = number < cache.heads ? number : -1;
  }
};

struct ClearRows {
  Slots cache;
  RowCopy copy;

  __device__ void operator()(long item) const {
    const auto [unit, slot, h, b, counted] = SlotUnit(item, copy, cache, cache.rule.slots);
    const int row = cache.rows(b);
    if (row < 0) return;
    if (unit == 0 && counted >= 0) {
      cache.count(row, counted) = {};
      if (counted == 0) cache.seen_of(row) = 0;
    }
    if (slot < 0) return;
    const auto clear = [&](std::byte* to) {
      to += unit * copy.unit;
      for (int i = 0; i < copy.unit; i += 2) *reinterpret_cast<std::uint16_t*>(to + i) = 0;
    };
    clear(cache.key(row, h, slot));
    if (unit < copy.value_units) clear(cache.value(row, h, slot));
    if (unit > 0) return;
    const std::int64_t at = cache.first(row, h) + slot;
    cache.scores[at] = 0;
    cache.entries[at] = 0;
  }
};

// Copies a row of `from`, by the index of the call, to row b of `to`.
struct CopyRows {
  Slots from, to;
  RowCopy copy;

  __device__ void operator()(long item) const {
    const auto [unit, slot, h, b, counted] =
        SlotUnit(item, copy, to, to.rule.common.places + to.pending);
    const int to_row = to.rows(b);
    const int from_row = from.rows(b);
    if (to_row < 0 || from_row < 0) return;
    if (unit == 0 && counted >= 0) {
      to.count(to_row, counted) = from.count(from_row, counted);
      if (counted == 0) to.seen_of(to_row) = from.seen_of(from_row);
    }
    if (slot < 0) return;
    const int places = to.places(h);
    if (slot >= (slot < places ? from.count(from_row, h).count : places + to.pending)) return;
    copy.k(to.key(to_row, h, slot), from.key(from_row, h, slot), unit);
    copy.v(to.value(to_row, h, slot), from.value(from_row, h, slot), unit);
    if (unit > 0) return;
    const std::int64_t at = to.first(to_row, h) + slot;
    const std::int64_t from_at = from.first(from_row, h) + slot;
    to.scores[at] = from.scores[from_at];
    to.entries[at] = from.entries[from_at];
  }
};

// Writes tokens after the pending tokens.
struct AppendTokens {
  Slots cache;
  ReadRows k, v;
  TokenScores scores;
  int seqlen;
  RowCopy copy;

  __device__ void operator()(long item) const {
    const auto [unit, t, h, b] = RowUnit(item, copy, seqlen, cache.heads);
    const int slot = cache.places(h) + cache.pending + t;
    copy.k(cache.key(b, h, slot), k.at(b, h, t), unit);
    copy.v(cache.value(b, h, slot), v.at(b, h, t), unit);
    if (unit > 0) return;
    const std::int64_t at = cache.first(b, h) + slot;
    const float score = scores(b, h, t);
    const std::int32_t position = cache.seen[b] + cache.pending + t;
    const std::int32_t entry = cache.rule.head_rule(h).admits(score) ? position : ~position;
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
    const int from = cache.places(h) + t;
    copy.k(cache.key(b, h, to), cache.key(b, h, from), unit);
    copy.v(cache.value(b, h, to), cache.value(b, h, from), unit);
  }
};

// Copies the rows of the tokens that have slots, according to the positions in the slots.
struct FillRows {
  Slots cache;
  ReadRows k, v;
  RowCopy copy;

  __device__ void operator()(long item) const {
    const auto [unit, slot, h, b, counted] = SlotUnit(item, copy, cache, cache.rule.common.places);
    const int row = cache.rows(b);
    if (row < 0 || slot < 0 || slot >= cache.count(row, h).count) return;
    const std::int32_t t = position_of_entry(cache.entries[cache.first(row, h) + slot]);
    copy.k(cache.key(row, h, slot), k.at(b, h, t), unit);
    copy.v(cache.value(row, h, slot), v.at(b, h, t), unit);
  }
};

}  // namespace flash_dmattn::cuda::kv
