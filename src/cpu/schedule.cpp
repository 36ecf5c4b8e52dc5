#include "cpu/schedule.h"

#include <algorithm>
#include <string>

#include "arguments.h"
#include "cpu/selection/selection.h"
#include "plan.h"

namespace flash_dmattn::cpu {
namespace {

// Rows of a tile over all heads of the group. They are enough to make the packing of a block of keys
// (once per tile) cheap, and few enough for their sums to stay in the second-level cache. With intervals
// a tile has fewer rows, because the keys that it sees grow with its queries.
constexpr std::int64_t dense_rows = 384;
constexpr std::int64_t interval_rows = 96;
constexpr std::int64_t least_queries = 8;

}  // namespace

std::int64_t tile_queries(const Problem& p) {
  const std::int64_t group = p.heads_kv == 0 ? 1 : p.heads_q / p.heads_kv;
  const std::int64_t rows = p.intervals_shape[0] != 0 ? interval_rows : dense_rows;
  const std::int64_t queries = std::max(least_queries, rows / std::max<std::int64_t>(group, 1));
  return std::clamp<std::int64_t>(p.seqlen_q, 1, queries);
}

namespace {

struct ListSchedule {
  TileListArgs args;
  std::size_t size = 0;
  std::size_t bytes;

  ListSchedule(const Problem& p, const Visibility& visibility, const Execution& execution)
      : args(tile_list_args(p, visibility, tile_queries(p))),
        bytes(tile_lists_workspace_size(args, execution)) {
    if (args.lists() > 0) size = tile_list_bytes(args.lists(), tile_list_entries(args, execution));
  }

  ScheduleContents build(std::span<std::byte> memory, const Execution& execution) const {
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
};

}  // namespace

void plan_schedule(const Problem& p, const Visibility& visibility, const Execution& execution,
                   SchedulePlan& plan) {
  make_schedule_plan(ListSchedule(p, visibility, execution), plan);
}

}  // namespace flash_dmattn::cpu
