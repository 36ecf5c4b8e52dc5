#pragma once

#include <cstdint>

#include "cpu/kernels/keys.h"
#include "cpu/task.h"

// Finds the next victim of a KV cache while its keys are read.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

struct WorstSlot {
  float score;
  std::int32_t position;
  std::int32_t slot;
};

// The key with the lower score, or with the older position if scores are equal.
inline WorstSlot worse(const WorstSlot& a, const WorstSlot& b) {
  return b.score < a.score || (b.score == a.score && b.position < a.position) ? b : a;
}

// The worst of the keys that compete among those of `blocks`, which are slots of a tile. None of them has a score that is
// NaN.
inline WorstSlot worst_slot(const Task& t, const Tile& tile, const KeyBlockIterator& blocks) {
  constexpr std::int32_t latest = 0x7fffffff;
  const Slots& slots = t.slots;
  const float* scores = slots.scores + first_slot(t, tile);
  const std::int32_t* positions = slots.positions + first_slot(t, tile);
  const auto end =
      static_cast<std::int32_t>(slots.seen[tile.key_batch * slots.row_seen] - slots.delay);
  Vec low = splat(infinity);
  Int oldest = Int{} + latest;
  Int found{};
  std::int64_t slot = blocks.position();
  for (; slot + lanes <= blocks.end(); slot += lanes) {
    const Vec score = load(scores + slot);
    const Int position = load_as<Int>(positions + slot);
    const Int competes = (position >= 0) & (position < end);
    const Int is_worse = competes & ((score < low) | ((score == low) & (position < oldest)));
    low = is_worse ? score : low;
    oldest = is_worse ? position : oldest;
    found = is_worse ? lane_numbers() + static_cast<std::int32_t>(slot) : found;
  }
  WorstSlot worst{low[0], oldest[0], found[0]};
  for (int i = 1; i < lanes; ++i) worst = worse(worst, {low[i], oldest[i], found[i]});
  for (; slot < blocks.end(); ++slot) {
    if (positions[slot] < 0 || positions[slot] >= end) continue;
    worst = worse(worst, {scores[slot], positions[slot], static_cast<std::int32_t>(slot)});
  }
  return worst;
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
