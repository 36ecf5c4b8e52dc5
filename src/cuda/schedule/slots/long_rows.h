#pragma once

#include <cstddef>

#include "cuda/schedule/slots/key_slots.h"

// Slots of rows of many tiles. The kernel of key_slots.cu would visit all keys of a row once for every 512 tiles, with
// the blocks of one cluster. Here two sorts number the events, and the whole GPU visits all keys once in every step.
namespace flash_dmattn::cuda::long_rows {

std::size_t workspace_size(const TileListArgs& args, const KeySlotShape& shape);

void assign_slots(const TileListArgs& args, const KeySlotShape& shape, const KeySlotBuffers& out,
                  const Execution& execution);

}  // namespace flash_dmattn::cuda::long_rows
