#include "cuda/schedule/schedule.h"

#include <string>

#include "arguments.h"
#include "cuda/selection/selection.h"
#include "selection/query_tile_lists.h"

namespace flash_dmattn::cuda {
namespace {

// A schedule of tile lists, if there is one.
struct ListSchedule {
  TileListArgs args;
  std::int64_t entries = 0;   // entries of all lists
  std::int64_t capacity = 0;  // capacity of each list
  bool exist = false;

  ListSchedule(const Problem& p, const Visibility& visibility, Direction direction,
               std::int64_t tile_rows)
      : args(tile_list_args(p, visibility, tile_rows)) {
    args.by_position = direction == Direction::backward && p.deterministic;
    if (args.lists() == 0 || args.tiles() > max_query_tiles) return;
    if (args.key_list.keys != nullptr) {
      exist = true;
      return;
    }
    if (args.intervals.data == nullptr || args.bound.consecutive) return;
    capacity = tile_list_capacity(args);
    entries = args.lists() * capacity;
    // If lists have room for every key (a window as wide as the keys, a prefix, padding) they skip little, and kernels
    // visit the keys from the first to the last faster than they follow lists.
    exist = capacity < args.seqlen_k;
  }

  std::size_t bytes() const { return exist ? tile_list_bytes(args.lists(), entries) : 0; }
};

}  // namespace

std::size_t tile_list_schedule_size(const Problem& p, const Visibility& visibility,
                                    Direction direction, std::int64_t tile_rows) {
  return ListSchedule(p, visibility, direction, tile_rows).bytes();
}

std::size_t tile_list_schedule_workspace_size(const Problem& p, const Visibility& visibility,
                                              Direction direction, std::int64_t tile_rows) {
  const ListSchedule lists(p, visibility, direction, tile_rows);
  return lists.exist ? tile_lists_workspace_size(lists.args) : 0;
}

ScheduleContents build_tile_list_schedule(const Problem& p, const Visibility& visibility,
                                          Direction direction, std::int64_t tile_rows,
                                          std::span<std::byte> memory, const Execution& execution) {
  const ListSchedule lists(p, visibility, direction, tile_rows);
  if (!lists.exist) return {};
  require_memory(memory, lists.bytes());
  ScheduleAllocator allocator(memory.data());
  build_tile_lists(lists.args, take_tile_lists(allocator, lists.args.lists(), lists.entries),
                   execution);
  const bool listed = lists.args.key_list.keys != nullptr;
  const bool both = listed || !p.deterministic;
  return {.kind = listed ? ScheduleKind::key_list_tiles : ScheduleKind::query_tile_lists,
          .serves_forward = both || direction == Direction::forward,
          .serves_backward = both || direction == Direction::backward,
          .data = memory.data(),
          .bytes = lists.bytes(),
          .tile_rows = tile_rows,
          .capacity = listed ? lists.args.key_list.stride : lists.capacity,
          .keys = lists.args.key_list.keys};
}

// ---- Slots --------------------------------------------------------------------------------------

namespace {

KeySlotShape slot_shape(const TileListArgs& args, std::int64_t slots, std::int64_t segments) {
  return {.rows = args.batch * args.heads,
          .seqlen_k = args.seqlen_k,
          .slots = slots,
          .segments = segments};
}

// A schedule of slots, if there is one.
struct SlotSchedule {
  TileListArgs args;
  KeySlotShape shape;
  bool exist;

  SlotSchedule(const Problem& p, const Visibility& visibility, const SlotGeometry& geometry)
      : args(tile_list_args(p, visibility, geometry.tile_rows)), exist(false) {
    if (geometry.segments < 1) {
      throw InvalidArgument("segments", std::to_string(geometry.segments), "at least 1");
    }
    if (args.lists() == 0 || args.tiles() > max_query_tiles) return;
    if (args.intervals.data == nullptr || args.bound.consecutive) return;
    TileListArgs two_tiles = args;
    two_tiles.tile_rows *= 2;
    shape = slot_shape(args, tile_list_capacity(two_tiles), geometry.segments);
    exist = shape.slots > 0 && 2 * shape.slots <= args.seqlen_k;
  }

  std::size_t bytes() const { return exist ? key_slot_bytes(shape) : 0; }
};

}  // namespace

std::size_t slot_schedule_size(const Problem& p, const Visibility& visibility,
                               const SlotGeometry& geometry) {
  return SlotSchedule(p, visibility, geometry).bytes();
}

std::size_t slot_schedule_workspace_size(const Problem& p, const Visibility& visibility,
                                         const SlotGeometry& geometry) {
  const SlotSchedule slots(p, visibility, geometry);
  return slots.exist ? slot_workspace_size(slots.args) : 0;
}

ScheduleContents build_slot_schedule(const Problem& p, const Visibility& visibility,
                                     Direction direction, const SlotGeometry& geometry,
                                     std::span<std::byte> memory, const Execution& execution) {
  const SlotSchedule slots(p, visibility, geometry);
  if (!slots.exist) return {};
  require_memory(memory, slots.bytes());
  ScheduleAllocator allocator(memory.data());
  assign_slots(slots.args, slots.shape, take_key_slots(allocator, slots.shape), execution);
  return {.kind = ScheduleKind::key_slots,
          .serves_forward = direction == Direction::forward,
          .serves_backward = direction == Direction::backward,
          .data = memory.data(),
          .bytes = slots.bytes(),
          .tile_rows = geometry.tile_rows,
          .capacity = slots.shape.slots,
          .segments = geometry.segments};
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
