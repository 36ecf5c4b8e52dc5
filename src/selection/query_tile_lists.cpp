#include "selection/query_tile_lists.h"

#include <array>
#include <string>

#include "arguments.h"
#include "selection/schedule_contents.h"

namespace flash_dmattn {

TileListBuffers take_tile_lists(ScheduleAllocator& memory, std::int64_t lists,
                                std::int64_t entries) {
  return {.begin = memory.take<std::int64_t>(lists),
          .count = memory.take<std::int32_t>(lists),
          .full = memory.take<std::int32_t>(lists),
          .keys = memory.take<std::int32_t>(entries)};
}

std::size_t tile_list_bytes(std::int64_t lists, std::int64_t entries) {
  ScheduleAllocator counted(nullptr);
  take_tile_lists(counted, lists, entries);
  return counted.used();
}

QueryTileLists view_of(const TileListBuffers& buffers, const TileListArgs& args) {
  return {.tile_rows = args.tile_rows,
          .tiles = args.tiles(),
          .begin = buffers.begin,
          .count = buffers.count,
          .full = buffers.full,
          .keys = buffers.keys,
          .stride_batch = args.batch == 1 ? 0 : args.heads * args.tiles(),
          .stride_head = args.heads == 1 ? 0 : args.tiles()};
}

TileListArgs tile_list_args(const Problem& problem, const Visibility& visibility,
                            std::int64_t tile_rows) {
  const bool listed = problem.key_list_shape != std::array<std::int64_t, 2>{};
  const auto [batch, heads] = listed ? problem.key_list_shape : problem.intervals_shape;
  return {.batch = batch,
          .heads = heads,
          .seqlen_q = problem.seqlen_q,
          .seqlen_k = problem.seqlen_k,
          .tile_rows = tile_rows,
          .causal = problem.causal,
          .intervals = visibility.intervals,
          .bound = visibility.bound,
          .key_list = visibility.key_list};
}

QueryTileLists query_tile_lists(const Schedule& given, const KeyList& key_list,
                                std::int64_t tile_rows) {
  const ScheduleContents schedule = ScheduleContents::of(given);
  if (schedule.empty()) return {};
  if (schedule.kind == ScheduleKind::key_slots) {
    throw InvalidArgument("schedule", "slots of keys", "lists of keys");
  }
  if (schedule.tile_rows != tile_rows) {
    throw InvalidArgument("schedule", "tiles of " + std::to_string(schedule.tile_rows) + " queries",
                          "tiles of " + std::to_string(tile_rows));
  }
  const bool listed = schedule.kind == ScheduleKind::key_list_tiles;
  if (listed && (schedule.keys != key_list.keys || schedule.capacity != key_list.stride)) {
    throw InvalidArgument("schedule", "one that was built for another key list",
                          "one built for visibility.key_list");
  }
  const TileListArgs shape = tile_list_args(schedule.problem, {}, tile_rows);
  ScheduleAllocator memory(schedule.data);
  QueryTileLists lists = view_of(take_tile_lists(memory, shape.lists(), 0), shape);
  if (listed) lists.keys = key_list.keys;
  return lists;
}

}  // namespace flash_dmattn
