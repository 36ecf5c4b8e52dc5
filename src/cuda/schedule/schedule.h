#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/schedule/slots/key_slots.h"
#include "selection/schedule_contents.h"

// Schedules of a GPU. Their size follows from shapes and the bound of the intervals alone, and they are built without
// waiting for the device. A kernel family selects the kind of schedule that its kernels of a direction follow.
namespace flash_dmattn::cuda {

// ---- Query tiles' key lists ---------------------------------------------------------------------
//
// The lists are empty for intervals of consecutive keys, which kernels visit from the first to the last. They are also
// empty if a list has room for every key, because it would skip little. If gradients are deterministic, the backward's
// lists are sorted by position.

std::size_t tile_list_schedule_size(const Problem& problem, const Visibility& visibility,
                                    Direction direction, std::int64_t tile_rows);
std::size_t tile_list_schedule_workspace_size(const Problem& problem, const Visibility& visibility,
                                              Direction direction, std::int64_t tile_rows);
ScheduleContents build_tile_list_schedule(const Problem& problem, const Visibility& visibility,
                                          Direction direction, std::int64_t tile_rows,
                                          std::span<std::byte> memory, const Execution& execution);

// ---- Slots of a key-major kernel ----------------------------------------------------------------
//
// The slots are empty for intervals of consecutive keys, which are neighbours anyway, and if there would be more slots
// than half of the keys: neighbouring keys then waste less time than arrivals and departures take (key_slots.h).

// The way in which a kernel cuts the queries.
struct SlotGeometry {
  std::int64_t tile_rows;
  std::int64_t segments;  // computed independently
};

std::size_t slot_schedule_size(const Problem& problem, const Visibility& visibility,
                               const SlotGeometry& geometry);
std::size_t slot_schedule_workspace_size(const Problem& problem, const Visibility& visibility,
                                         const SlotGeometry& geometry);
ScheduleContents build_slot_schedule(const Problem& problem, const Visibility& visibility,
                                     Direction direction, const SlotGeometry& geometry,
                                     std::span<std::byte> memory, const Execution& execution);

// Returns the slots of such a schedule. Throws InvalidArgument for another kind or geometry.
KeySlots key_slots(const Schedule& schedule, const SlotGeometry& geometry);

}  // namespace flash_dmattn::cuda
