#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "flash_dmattn/schedule.h"

// Schedules of a GPU: sized from shapes and the bound of the intervals alone, built without waiting for the
// device. A kernel family picks the kind that its kernels of a direction walk.
namespace flash_dmattn::cuda {

// ---- Query tiles' key lists ---------------------------------------------------------------------
//
// Empty for intervals of consecutive keys, which kernels walk from the first to the last, and where the lists
// would take long and leave little out. Where gradients are deterministic the backward's lists go by position.

std::size_t tile_list_schedule_size(const Problem& problem, const Visibility& visibility,
                                    Direction direction, std::int64_t tile_rows);
std::size_t tile_list_schedule_workspace_size(const Problem& problem, const Visibility& visibility,
                                              Direction direction, std::int64_t tile_rows);
Schedule build_tile_list_schedule(const Problem& problem, const Visibility& visibility,
                                  Direction direction, std::int64_t tile_rows,
                                  std::span<std::byte> memory, const Execution& execution);

}  // namespace flash_dmattn::cuda
