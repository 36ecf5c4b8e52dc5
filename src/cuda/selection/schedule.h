#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/selection/key_slots.h"
#include "selection/schedule_contents.h"

// Schedules of a GPU: sized from shapes and the bound of the intervals alone, built without waiting for the
// device. A kernel family picks the kind that its kernels of a direction follow.
namespace flash_dmattn::cuda {

// ---- Query tiles' key lists ---------------------------------------------------------------------
//
// Empty for intervals of consecutive keys, which kernels visit from the first to the last, and where a list has room
// for every key and so leaves little out. Where gradients are deterministic the backward's lists go by position.

std::size_t tile_list_schedule_size(const Problem& problem, const Visibility& visibility,
                                    Direction direction, std::int64_t tile_rows);
std::size_t tile_list_schedule_workspace_size(const Problem& problem, const Visibility& visibility,
                                              Direction direction, std::int64_t tile_rows);
ScheduleContents build_tile_list_schedule(const Problem& problem, const Visibility& visibility,
                                          Direction direction, std::int64_t tile_rows,
                                          std::span<std::byte> memory, const Execution& execution);

// ---- Slots of a key-major kernel ----------------------------------------------------------------
//
// Empty for intervals of consecutive keys, which are neighbours anyway, and for more slots than half of the keys: what
// neighbours visit in vain then takes less time than coming and going (key_slots.h).

// How a kernel cuts the queries.
struct SlotGeometry {
  std::int64_t tile_rows;
  std::int64_t segments;  // that are worked on independently
};

std::size_t slot_schedule_size(const Problem& problem, const Visibility& visibility,
                               const SlotGeometry& geometry);
std::size_t slot_schedule_workspace_size(const Problem& problem, const Visibility& visibility,
                                         const SlotGeometry& geometry);
ScheduleContents build_slot_schedule(const Problem& problem, const Visibility& visibility,
                                     Direction direction, const SlotGeometry& geometry,
                                     std::span<std::byte> memory, const Execution& execution);

// The slots of such a schedule. Throws InvalidArgument for another kind or geometry.
KeySlots key_slots(const Schedule& schedule, const SlotGeometry& geometry);

}  // namespace flash_dmattn::cuda
