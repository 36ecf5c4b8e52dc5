#include "cpu/schedule.h"

#include <algorithm>

#include "common/arguments.h"
#include "cpu/selection/selection.h"

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

ListSchedule::ListSchedule(const Problem& p, const Visibility& visibility,
                           const Execution& execution)
    : args_(tile_list_args(p, visibility, tile_queries(p))) {
  if (args_.lists() == 0) return;
  entries_ = tile_list_entries(args_, execution);
  build_bytes_ = tile_lists_workspace_size(args_, execution);
}

void ListSchedule::place(WorkspaceAllocator& workspace) {
  buffers_ = take_tile_lists(workspace, args_.lists(), entries_);
  build_space_ = workspace.lend(build_bytes_);
}

void ListSchedule::build(const Execution& execution) const {
  if (args_.lists() == 0) return;
  build_tile_lists(args_, buffers_, entries_,
                   with_workspace(execution, {build_space_, build_bytes_}, build_bytes_));
}

QueryTileLists ListSchedule::lists() const {
  return args_.lists() == 0 ? QueryTileLists{} : view_of(buffers_, args_);
}

}  // namespace flash_dmattn::cpu
