#include "selection/query_tile_lists.h"

#include <array>
#include <string>

#include "arguments.h"

namespace flash_dmattn {

TileListLayout::TileListLayout(std::int64_t lists, std::int64_t entries) {
  const auto size = [](std::int64_t elements, std::size_t element) {
    return align_up(static_cast<std::size_t>(elements) * element);
  };
  count = begin + size(lists, sizeof(std::int64_t));
  full = count + size(lists, sizeof(std::int32_t));
  keys = full + size(lists, sizeof(std::int32_t));
  bytes = keys + size(entries, sizeof(std::int32_t));
}

TileListBuffers TileListLayout::buffers_in(void* memory) const {
  auto* const base = static_cast<std::byte*>(memory);
  return {.begin = reinterpret_cast<std::int64_t*>(base + begin),
          .count = reinterpret_cast<std::int32_t*>(base + count),
          .full = reinterpret_cast<std::int32_t*>(base + full),
          .keys = reinterpret_cast<std::int32_t*>(base + keys)};
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

QueryTileLists query_tile_lists(const Schedule& schedule, const KeyList& key_list,
                                std::int64_t tile_rows) {
  if (schedule.empty()) return {};
  if (schedule.kind == Schedule::Kind::key_slots) {
    throw InvalidArgument("schedule", "slots of keys", "lists of keys");
  }
  if (schedule.tile_rows != tile_rows) {
    throw InvalidArgument("schedule", "tiles of " + std::to_string(schedule.tile_rows) + " queries",
                          "tiles of " + std::to_string(tile_rows));
  }
  const bool listed = schedule.kind == Schedule::Kind::key_list_tiles;
  if (listed && (schedule.keys != key_list.keys || schedule.capacity != key_list.stride)) {
    throw InvalidArgument("schedule", "one that was built for another key list",
                          "one built for visibility.key_list");
  }
  const TileListArgs shape = tile_list_args(schedule.problem, {}, tile_rows);
  const TileListLayout layout(shape.lists(), 0);
  const auto* const base = static_cast<const std::byte*>(schedule.data);
  QueryTileLists lists = view_of({}, shape);
  lists.begin = reinterpret_cast<const std::int64_t*>(base + layout.begin);
  lists.count = reinterpret_cast<const std::int32_t*>(base + layout.count);
  lists.full = reinterpret_cast<const std::int32_t*>(base + layout.full);
  lists.keys = listed ? key_list.keys : reinterpret_cast<const std::int32_t*>(base + layout.keys);
  return lists;
}

}  // namespace flash_dmattn
