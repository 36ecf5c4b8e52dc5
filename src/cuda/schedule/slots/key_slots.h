#pragma once

#include <cstddef>
#include <cstdint>

#include "common/query_tile_lists.h"
#include "cuda/primitives/device_workspace.h"
#include "flash_dmattn/execution.h"

// Slots are the schedule of a key-major kernel.
//
// A key occupies a slot from the first tile that sees it to the last, as a value occupies a register. The keys of a
// block of consecutive slots are a dense key tile, in which only few keys change from one query tile to the next.
//
// Arrivals are the keys of a row numbered by their first tile, and by position among equals. Departures are the keys
// numbered by their last tile. A row has used as many slots by a tile as two neighbouring tiles up to it together see
// keys at most (TileUse). The first arrivals of the tile take the slots that it adds. Any other arrival n takes the slot
// of departure n - used, which was before the previous tile. Each slot stays empty for one tile while the next key loads.
// The keys of a slot form a chain, and `successor` gives the following arrival. Slots begin in the order of their numbers.
//
// The tiles may be cut into segments that are computed independently. Slot s of segment g begins with arrival
// starts[g][s], which may have arrived before the segment, or may arrive within or after it. A key that crosses a cut
// appears in both segments.
namespace flash_dmattn::cuda {

struct KeySlotShape {
  std::int64_t rows = 0;  // number of (batch, head)
  std::int64_t seqlen_k = 0;
  std::int64_t slots = 0;     // of all rows, used or not: tile_list_capacity of two tiles
  std::int64_t segments = 1;  // each has ceil(tiles / segments) tiles
};

// The state of a row at the end of a tile.
struct alignas(8) TileUse {
  std::int32_t used;     // slots that have had a key
  std::int32_t arrived;  // keys
};

template <class Integer>
struct KeySlotArrays {
  Integer* count = nullptr;     // [rows] number of arrivals
  Integer* used = nullptr;      // [rows] slots that some key takes, at most `slots`
  Integer* arrivals = nullptr;  // [rows, Sk] keys, -1 after the last
  Integer* successor =
      nullptr;  // [rows, Sk] by arrival number; -1 for the last arrival of a slot, unwritten after `count`
  Integer* starts = nullptr;  // [rows, segments, slots]; -1 if the slot is empty from there on
};
using KeySlotBuffers = KeySlotArrays<std::int32_t>;

// The arrays as kernels read them.
struct KeySlots : KeySlotArrays<const std::int32_t> {
  KeySlotShape shape;
};

// The arrays in a workspace.
KeySlotBuffers take_key_slots(WorkspaceAllocator& workspace, const KeySlotShape& shape);

std::size_t slot_workspace_size(const TileListArgs& args, const KeySlotShape& shape);

// The bytes of shared memory that a block of assign_slots requires from a GPU.
int slot_shared_bytes();

// Assigns slots. The function only enqueues work.
void assign_slots(const TileListArgs& args, const KeySlotShape& shape, const KeySlotBuffers& out,
                  const Execution& execution);

}  // namespace flash_dmattn::cuda
