#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/schedule/slots/key_slots.h"
#include "selection/query_tile_lists.h"
#include "selection/schedule_contents.h"

// Schedules of a GPU, as plans. Their size follows from shapes and the bound of the intervals alone, and they are built
// without waiting for the device. A kernel family selects the kind of schedule that its kernels of a direction follow.
namespace flash_dmattn::cuda {

// Query tiles' key lists. There are none for intervals of consecutive keys, which kernels visit from the first to the
// last, nor if a list has room for every key, because it would skip little. If gradients are deterministic, the
// backward's lists are sorted by position.
struct ListSchedule {
  std::size_t size = 0;   // of the schedule
  std::size_t bytes = 0;  // of the workspace

  // `both_directions`: the kernels of the other direction follow lists of such tiles, too.
  ListSchedule(const Problem& problem, const Visibility& visibility, Direction direction,
               std::int64_t tile_rows, bool both_directions);
  ScheduleContents build(std::span<std::byte> memory, const Execution& execution) const;

 private:
  TileListArgs args_;
  std::int64_t entries_ = 0;   // entries of all lists
  std::int64_t capacity_ = 0;  // capacity of each list
  bool serves_forward_;
  bool serves_backward_;
};

// The way in which a kernel cuts the queries.
struct SlotGeometry {
  std::int64_t tile_rows;
  std::int64_t segments;  // computed independently
};

// Slots of a key-major kernel. There are none for intervals of consecutive keys, which are neighbours anyway, nor if there
// would be more slots than half of the keys: neighbouring keys then waste less time than arrivals and departures take
// (key_slots.h).
struct SlotSchedule {
  std::size_t size = 0;
  std::size_t bytes = 0;

  SlotSchedule(const Problem& problem, const Visibility& visibility, Direction direction,
               const SlotGeometry& geometry);
  ScheduleContents build(std::span<std::byte> memory, const Execution& execution) const;

 private:
  TileListArgs args_;
  KeySlotShape shape_;
  Direction direction_;
};

// Returns the slots of such a schedule. Throws InvalidArgument for another kind or geometry.
KeySlots key_slots(const Schedule& schedule, const SlotGeometry& geometry);

}  // namespace flash_dmattn::cuda
