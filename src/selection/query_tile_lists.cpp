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
  const auto [batch, heads] = problem.intervals_shape;
  return {.batch = batch,
          .heads = heads,
          .seqlen_q = problem.seqlen_q,
          .seqlen_k = problem.seqlen_k,
          .tile_rows = tile_rows,
          .causal = problem.causal,
          .intervals = visibility.intervals,
          .bound = visibility.bound};
}

QueryTileLists query_tile_lists(const Schedule& given, std::int64_t tile_rows) {
  const ScheduleContents schedule = ScheduleContents::of(given);
  if (schedule.empty()) return {};
  if (schedule.kind == ScheduleKind::key_slots) {
    throw InvalidArgument("schedule", "slots of keys", "lists of keys");
  }
  if (schedule.tile_rows != tile_rows) {
    throw InvalidArgument("schedule", "tiles of " + std::to_string(schedule.tile_rows) + " queries",
                          "tiles of " + std::to_string(tile_rows));
  }
  const TileListArgs shape = tile_list_args(schedule.problem, {}, tile_rows);
  ScheduleAllocator memory(schedule.data);
  return view_of(take_tile_lists(memory, shape.lists(), 0), shape);
}

}  // namespace flash_dmattn
