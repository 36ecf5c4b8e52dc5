#pragma once

#include <cstddef>
#include <cstdint>

#include "common/query_tile_lists.h"
#include "cuda/primitives/device_workspace.h"
#include "cuda/schedule/slots/key_slots.h"

// Schedules of a GPU, each a part of the plan of a call, whose kernels follow it. Their size follows from shapes and the
// bound of the intervals alone, and they are built without waiting for the device.
namespace flash_dmattn::cuda {

// Query tile lists. There are none for intervals of consecutive keys, which kernels visit from the first to the
// last, nor if a list has room for every key, because it would skip little.
class ListSchedule {
 public:
  // The order of each list: full keys first, or all keys by their position, which additions in a fixed order need.
  enum class Order : bool { full_first, by_position };

  ListSchedule(const Problem& problem, const Visibility& visibility, Order order);

  bool exists() const { return exists_; }
  std::int64_t capacity() const { return capacity_; }  // keys of each list

  // Takes memory for the lists, and lends what only `build` needs.
  void place(WorkspaceAllocator& workspace);
  // Enqueues the launches, before any that write memory taken after `place`.
  void build(const Execution& execution) const;
  // Without lists there are no tiles, and without memory null pointers.
  QueryTileLists lists() const;

 private:
  TileListArgs args_;
  bool exists_ = false;
  std::int64_t capacity_ = 0;
  TileListBuffers buffers_;
  std::size_t build_bytes_ = 0;
  std::byte* build_space_ = nullptr;
};

// The way in which a kernel cuts the queries.
struct SlotGeometry {
  std::int64_t tile_rows;
  std::int64_t segments;  // computed independently
};

// Slots of a key-major kernel. There are none for intervals of consecutive keys, which are neighbours anyway, nor if there
// would be more slots than half of the keys: neighbouring keys then waste less time than arrivals and departures take
// (key_slots.h).
class SlotSchedule {
 public:
  SlotSchedule(const Problem& problem, const Visibility& visibility, const SlotGeometry& geometry);

  bool exists() const { return exists_; }

  // As in ListSchedule; `slots` is of a schedule that exists.
  void place(WorkspaceAllocator& workspace);
  void build(const Execution& execution) const;
  KeySlots slots() const;

 private:
  TileListArgs args_;
  bool exists_ = false;
  KeySlotShape shape_;
  KeySlotBuffers buffers_;
  std::size_t build_bytes_ = 0;
  std::byte* build_space_ = nullptr;
};

}  // namespace flash_dmattn::cuda
