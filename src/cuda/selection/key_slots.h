#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_dmattn/execution.h"
#include "selection/query_tile_lists.h"

// Slots: the schedule of a key-major kernel.
//
// A key lives in a slot from the first tile that sees it to the last, as a value lives in a register; the keys
// of a block of consecutive slots are a dense key tile of which only few change from one query tile to the
// next.
//
// Number the keys of a row by their first tile, and among equals by position: the arrivals; and by their last
// tile: the departures. Arrival n takes slot n if n < slots, else the slot of departure n - slots. Two neighbouring
// tiles together see no more than `slots` keys, so that departure was before the last tile: a slot rests for a tile
// between two keys, in which a kernel brings the next. The keys of a slot are thus a chain: slot s begins with
// arrival s, and successor leads on.
//
// The tiles may be cut into segments that are worked on independently: slot s of segment g begins with arrival
// starts[g][s], which may have arrived before the segment or arrive within or after it. A key that crosses a
// cut appears in both segments.
namespace flash_dmattn::cuda {

struct KeySlotShape {
  std::int64_t rows = 0;  // of (batch, head)
  std::int64_t seqlen_k = 0;
  std::int64_t slots = 0;     // tile_list_capacity of two tiles
  std::int64_t segments = 1;  // of ceil(tiles / segments) tiles
};

template <class Integer>
struct KeySlotArrays {
  Integer* count = nullptr;     // [rows] arrivals
  Integer* arrivals = nullptr;  // [rows, Sk] keys, -1 after the last
  Integer* successor =
      nullptr;  // [rows, Sk] by arrival number; -1 for the last of its slot, unwritten after it
  Integer* starts = nullptr;  // [rows, segments, slots]; -1: empty from there on
};
using KeySlotBuffers = KeySlotArrays<std::int32_t>;

// As kernels read them.
struct KeySlots : KeySlotArrays<const std::int32_t> {
  KeySlotShape shape;
};

// The arrays of a schedule, one after the other, and their bytes.
KeySlotBuffers take_key_slots(ScheduleAllocator& memory, const KeySlotShape& shape);
std::size_t key_slot_bytes(const KeySlotShape& shape);

std::size_t slot_workspace_size(const TileListArgs& args);

// Bytes of shared memory of a block of assign_slots, which a GPU must have.
int slot_shared_bytes();

// Only enqueues work.
void assign_slots(const TileListArgs& args, const KeySlotShape& shape, const KeySlotBuffers& out,
                  const Execution& execution);

}  // namespace flash_dmattn::cuda
