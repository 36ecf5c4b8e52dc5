#include "cuda/schedule/schedule.h"

#include <string>

#include "arguments.h"
#include "cuda/selection/selection.h"

namespace flash_dmattn::cuda {

// ---- Query tiles' key lists ---------------------------------------------------------------------

ListSchedule::ListSchedule(const Problem& p, const Visibility& visibility, Direction direction,
                           std::int64_t tile_rows, bool both_directions)
    : args_(tile_list_args(p, visibility, tile_rows)) {
  const bool serves_both = both_directions && !p.deterministic;
  serves_forward_ = serves_both || direction == Direction::forward;
  serves_backward_ = serves_both || direction == Direction::backward;
  args_.by_position = direction == Direction::backward && p.deterministic;
  if (args_.lists() == 0 || args_.tiles() > max_query_tiles) return;
  if (args_.intervals.data == nullptr || args_.bound.consecutive) return;
  capacity_ = tile_list_capacity(args_);
  // If lists have room for every key (a window as wide as the keys, a prefix, padding) they skip little, and kernels
  // visit the keys from the first to the last faster than they follow lists.
  if (capacity_ >= args_.seqlen_k) return;
  entries_ = args_.lists() * capacity_;
  size = tile_list_bytes(args_.lists(), entries_);
  bytes = tile_lists_workspace_size(args_);
}

ScheduleContents ListSchedule::build(std::span<std::byte> memory,
                                     const Execution& execution) const {
  if (size == 0) return {};
  require_memory(memory, size);
  ScheduleAllocator allocator(memory.data());
  build_tile_lists(args_, take_tile_lists(allocator, args_.lists(), entries_), execution);
  return {.kind = ScheduleKind::query_tile_lists,
          .serves_forward = serves_forward_,
          .serves_backward = serves_backward_,
          .data = memory.data(),
          .bytes = size,
          .tile_rows = args_.tile_rows,
          .capacity = capacity_};
}

// ---- Slots --------------------------------------------------------------------------------------

namespace {

KeySlotShape slot_shape(const TileListArgs& args, std::int64_t slots, std::int64_t segments) {
  return {.rows = args.batch * args.heads,
          .seqlen_k = args.seqlen_k,
          .slots = slots,
          .segments = segments};
}

}  // namespace

SlotSchedule::SlotSchedule(const Problem& p, const Visibility& visibility, Direction direction,
                           const SlotGeometry& geometry)
    : args_(tile_list_args(p, visibility, geometry.tile_rows)), direction_(direction) {
  if (geometry.segments < 1) {
    throw InvalidArgument("segments", std::to_string(geometry.segments), "at least 1");
  }
  if (args_.lists() == 0 || args_.tiles() > max_query_tiles) return;
  if (args_.intervals.data == nullptr || args_.bound.consecutive) return;
  TileListArgs two_tiles = args_;
  two_tiles.tile_rows *= 2;
  shape_ = slot_shape(args_, tile_list_capacity(two_tiles), geometry.segments);
  if (shape_.slots == 0 || 2 * shape_.slots > args_.seqlen_k) return;
  size = key_slot_bytes(shape_);
  bytes = slot_workspace_size(args_);
}

ScheduleContents SlotSchedule::build(std::span<std::byte> memory,
                                     const Execution& execution) const {
  if (size == 0) return {};
  require_memory(memory, size);
  ScheduleAllocator allocator(memory.data());
  assign_slots(args_, shape_, take_key_slots(allocator, shape_), execution);
  return {.kind = ScheduleKind::key_slots,
          .serves_forward = direction_ == Direction::forward,
          .serves_backward = direction_ == Direction::backward,
          .data = memory.data(),
          .bytes = size,
          .tile_rows = args_.tile_rows,
          .capacity = shape_.slots,
          .segments = shape_.segments};
}

KeySlots key_slots(const Schedule& given, const SlotGeometry& geometry) {
  const ScheduleContents schedule = ScheduleContents::of(given);
  if (schedule.empty()) return {};
  if (schedule.kind != ScheduleKind::key_slots || schedule.tile_rows != geometry.tile_rows ||
      schedule.segments != geometry.segments) {
    throw InvalidArgument("schedule",
                          "tiles of " + std::to_string(schedule.tile_rows) + " queries in " +
                              std::to_string(schedule.segments) + " segments",
                          "slots for tiles of " + std::to_string(geometry.tile_rows) +
                              " queries in " + std::to_string(geometry.segments) + " segments");
  }
  const TileListArgs args = tile_list_args(schedule.problem, {}, geometry.tile_rows);
  KeySlots slots;
  slots.shape = slot_shape(args, schedule.capacity, geometry.segments);
  ScheduleAllocator memory(schedule.data);
  const KeySlotBuffers buffers = take_key_slots(memory, slots.shape);
  slots.count = buffers.count;
  slots.arrivals = buffers.arrivals;
  slots.successor = buffers.successor;
  slots.starts = buffers.starts;
  return slots;
}

}  // namespace flash_dmattn::cuda
