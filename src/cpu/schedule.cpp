#include "cpu/schedule.h"

#include <algorithm>
#include <string>

#include "arguments.h"
#include "cpu/selection/selection.h"

namespace flash_dmattn::cpu {
namespace {

// Rows of a tile over all heads of the group. They are enough to make the packing of a block of keys
// (once per tile) cheap, and few enough for their sums to stay in the second-level cache. With intervals
// a tile has fewer rows, because the keys that it sees grow with its queries.
constexpr std::int64_t dense_rows = 384;
constexpr std::int64_t interval_rows = 96;
constexpr std::int64_t least_queries = 8;

TileListArgs tile_list_args(const Problem& p, const Visibility& visibility) {
  return flash_dmattn::tile_list_args(p, visibility, tile_queries(p));
}

}  // namespace

std::int64_t tile_queries(const Problem& p) {
  const std::int64_t group = p.heads_kv == 0 ? 1 : p.heads_q / p.heads_kv;
  const std::int64_t rows = p.intervals_shape[0] != 0 ? interval_rows : dense_rows;
  const std::int64_t queries = std::max(least_queries, rows / std::max<std::int64_t>(group, 1));
  return std::clamp<std::int64_t>(p.seqlen_q, 1, queries);
}

std::size_t schedule_size(const Problem& p, const Visibility& visibility, Direction,
                          const Execution& execution) {
  const TileListArgs args = tile_list_args(p, visibility);
  if (args.lists() == 0) return 0;
  return tile_list_bytes(args.lists(), tile_list_entries(args, execution));
}

std::size_t schedule_workspace_size(const Problem& p, const Visibility& visibility, Direction,
                                    const Execution& execution) {
  return tile_lists_workspace_size(tile_list_args(p, visibility), execution);
}

ScheduleContents build_schedule(const Problem& p, const Visibility& visibility, Direction,
                                std::span<std::byte> memory, const Execution& execution) {
  const TileListArgs args = tile_list_args(p, visibility);
  if (args.lists() == 0) return {};
  const std::size_t without_keys = tile_list_bytes(args.lists(), 0);
  require_memory(memory, without_keys);
  const auto capacity =
      static_cast<std::int64_t>((memory.size() - without_keys) / sizeof(std::int32_t));
  ScheduleAllocator allocator(memory.data());
  build_tile_lists(args, take_tile_lists(allocator, args.lists(), capacity), capacity, execution);
  return {.kind = ScheduleKind::query_tile_lists,
          .serves_forward = true,
          .serves_backward = true,
          .data = memory.data(),
          .bytes = memory.size(),
          .tile_rows = args.tile_rows};
}

}  // namespace flash_dmattn::cpu
