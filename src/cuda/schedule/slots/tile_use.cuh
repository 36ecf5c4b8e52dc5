#pragma once

#include "cuda/schedule/slots/key_slots.h"

// Searches of the arrivals of slots, by the use of slots in each tile of a row.
namespace flash_dmattn::cuda {

class RowUse {
 public:
  __device__ RowUse(const TileUse* tiles, int count) : tiles_(tiles), count_(count) {}

  // The first arrival of a slot in use.
  __device__ int first_arrival(int slot) const {
    const int tile = first_tile(0, [&](const TileUse& use) { return use.used > slot; });
    const TileUse before = before_tile(tile);
    return before.arrived + slot - before.used;
  }

  // The slot that an arrival of a tile takes as its first key; -1 if the slot has had another.
  __device__ int new_slot(int arrival, int tile) const {
    const TileUse before = before_tile(tile);
    const int slot = before.used + arrival - before.arrived;
    return slot < tiles_[tile].used ? slot : -1;
  }

  // The arrival that takes the slot of a departure; -1 if there is none. If the intervals break their bound, slots are too
  // few, and arrivals are lost that would come before the departure.
  __device__ int successor(int departure, int last_tile) const {
    const int tile = first_tile(
        last_tile + 2, [&](const TileUse& use) { return use.arrived - use.used > departure; });
    if (tile >= count_) return -1;
    const int arrival = departure + tiles_[tile].used;
    return arrival >= before_tile(tile).arrived ? arrival : -1;
  }

 private:
  __device__ TileUse before_tile(int tile) const {
    return tile == 0 ? TileUse{0, 0} : tiles_[tile - 1];
  }

  // The first tile from `begin` on for which a condition holds, which then holds for all later tiles.
  template <class Condition>
  __device__ int first_tile(int begin, const Condition& condition) const {
    int end = count_;
    while (begin < end) {
      const int middle = begin + (end - begin) / 2;
      condition(tiles_[middle]) ? end = middle : begin = middle + 1;
    }
    return begin;
  }

  const TileUse* tiles_;
  int count_;
};

}  // namespace flash_dmattn::cuda
