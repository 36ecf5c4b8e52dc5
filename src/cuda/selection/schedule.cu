#include "cuda/selection/schedule.h"

#include <string>

#include "arguments.h"
#include "cuda/selection/selection.h"
#include "selection/query_tile_lists.h"

namespace flash_dmattn::cuda {
namespace {

// The lists of a schedule, if there are to be any.
struct Lists {
  TileListArgs args;
  std::int64_t entries = 0;   // of all lists
  std::int64_t capacity = 0;  // of each
  bool exist = false;

  Lists(const Problem& p, const Visibility& visibility, Direction direction, std::int64_t tile_rows)
      : args(tile_list_args(p, visibility, tile_rows)) {
    args.by_position = direction == Direction::backward && p.deterministic;
    if (args.lists() == 0) return;
    if (args.key_list.keys != nullptr) {
      exist = true;
      return;
    }
    if (args.intervals.data == nullptr || args.bound.consecutive) return;
    capacity = tile_list_capacity(args);
    entries = args.lists() * capacity;
    exist = leave_enough_out();
  }

  std::size_t bytes() const { return exist ? TileListLayout(args.lists(), entries).bytes : 0; }

 private:
  // Lists of all keys are not worth more memory than this: intervals as wide as the keys (a prefix, padding)
  // leave little to skip.
  bool leave_enough_out() const {
    constexpr std::int64_t most_entries = std::int64_t{1} << 24;
    return entries <= most_entries || entries < args.lists() * args.seqlen_k;
  }
};

}  // namespace

std::size_t tile_list_schedule_size(const Problem& p, const Visibility& visibility,
                                    Direction direction, std::int64_t tile_rows) {
  return Lists(p, visibility, direction, tile_rows).bytes();
}

std::size_t tile_list_schedule_workspace_size(const Problem& p, const Visibility& visibility,
                                              Direction direction, std::int64_t tile_rows) {
  const Lists lists(p, visibility, direction, tile_rows);
  return lists.exist ? tile_lists_workspace_size(lists.args) : 0;
}

Schedule build_tile_list_schedule(const Problem& p, const Visibility& visibility,
                                  Direction direction, std::int64_t tile_rows,
                                  std::span<std::byte> memory, const Execution& execution) {
  const Lists lists(p, visibility, direction, tile_rows);
  if (!lists.exist) return {};
  require_memory(memory, lists.bytes());
  const TileListLayout layout(lists.args.lists(), lists.entries);
  build_tile_lists(lists.args, layout.buffers_in(memory.data()), execution);
  const bool listed = lists.args.key_list.keys != nullptr;
  const bool both = listed || !p.deterministic;
  return {.data = memory.data(),
          .bytes = lists.bytes(),
          .kind = listed ? Schedule::Kind::key_list_tiles : Schedule::Kind::query_tile_lists,
          .serves_forward = both || direction == Direction::forward,
          .serves_backward = both || direction == Direction::backward,
          .tile_rows = tile_rows,
          .capacity = lists.capacity};
}

}  // namespace flash_dmattn::cuda
