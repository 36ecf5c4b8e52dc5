#include "cuda/selection/slots.cuh"

#include <algorithm>
#include <cstdint>
#include <string>

#include <cub/device/device_radix_sort.cuh>

#include "arguments.h"
#include "cuda/selection/tile_list_arguments.h"

namespace flash_dmattn::cuda {
namespace {

struct Work {
  slots::Rows rows;
  std::uint64_t* unsorted = nullptr;
  std::uint64_t* other = nullptr;
  void* sort_workspace = nullptr;
  std::size_t sort_bytes = 0;
};

std::int64_t row_count(const TileListArgs& args) { return args.batch * args.heads; }

// Keys come in order and stay so among equals, the sort being stable. With a null workspace it only
// sets `bytes`.
void sort(const TileListArgs& args, const slots::EventLayout& layout,
          cub::DoubleBuffer<std::uint64_t>& events, void* workspace, std::size_t& bytes,
          cudaStream_t stream) {
  check(cub::DeviceRadixSort::SortKeys(workspace, bytes, events,
                                       2 * row_count(args) * args.seqlen_k, layout.key_bits,
                                       layout.row_shift() + bits_for(row_count(args)), stream),
        "sorting arrivals and departures");
}

Work carve(const TileListArgs& args, const SlotSchedule& schedule, Carver& workspace) {
  Work work;
  slots::Rows& rows = work.rows;
  rows.tiles = static_cast<int>(args.tiles());
  rows.seqlen_k = static_cast<int>(args.seqlen_k);
  rows.ctas_per_row = ceil_div(rows.seqlen_k, slots::threads);
  rows.segment_tiles = ceil_div(std::max(rows.tiles, 1), schedule.segments);
  rows.layout = {.key_bits = bits_for(args.seqlen_k),
                 .tile_bits = bits_for(std::int64_t{rows.tiles} + 1),
                 .never = rows.tiles};
  rows.schedule = schedule;
  const std::int64_t keys = row_count(args) * args.seqlen_k;
  work.unsorted = workspace.take<std::uint64_t>(2 * keys);
  work.other = workspace.take<std::uint64_t>(2 * keys);
  rows.departure = workspace.take<std::int32_t>(keys);
  cub::DoubleBuffer<std::uint64_t> events(work.unsorted, work.other);
  sort(args, rows.layout, events, nullptr, work.sort_bytes, nullptr);
  work.sort_workspace = workspace.take<char>(static_cast<std::int64_t>(work.sort_bytes));
  return work;
}

}  // namespace

std::size_t slot_workspace_size(const TileListArgs& args) {
  validate_tile_list_args(args);
  if (row_count(args) * args.seqlen_k == 0) return 0;
  Carver workspace(nullptr);
  carve(args, SlotSchedule{}, workspace);
  return workspace.used();
}

void assign_slots(const TileListArgs& args, const SlotSchedule& schedule,
                  const Execution& execution) {
  const std::size_t bytes = slot_workspace_size(args);
  const bool has_keys = bytes > 0;
  const std::int64_t rows = row_count(args);
  if (schedule.slots < 0 || (schedule.slots == 0 && has_keys)) {
    throw InvalidArgument("slots", std::to_string(schedule.slots), "tile_list_capacity");
  }
  if (schedule.segments < 1) {
    throw InvalidArgument("segments", std::to_string(schedule.segments), "at least 1");
  }
  require_pointer("count", schedule.count, rows > 0);
  require_pointer("arrivals", schedule.arrivals, has_keys);
  require_pointer("successor", schedule.successor, has_keys);
  require_pointer("starts", schedule.starts, has_keys);
  require_workspace(execution, bytes);

  const auto stream = static_cast<cudaStream_t>(execution.stream);
  if (!has_keys) {
    if (rows == 0) return;
    check(cudaMemsetAsync(schedule.count, 0, static_cast<std::size_t>(rows) * 4, stream),
          "clearing the count of arrivals");
    return;
  }
  Carver workspace(execution.workspace);
  Work work = carve(args, schedule, workspace);
  work.rows.events = work.unsorted;
  const std::int64_t key_ctas = rows * work.rows.ctas_per_row;
  launch_grid(slots::list_events, {key_ctas, slots::threads}, stream, key_tree::AllKeys(args),
              work.rows);
  cub::DoubleBuffer<std::uint64_t> events(work.unsorted, work.other);
  sort(args, work.rows.layout, events, work.sort_workspace, work.sort_bytes, stream);
  work.rows.events = events.Current();
  launch_grid(slots::number_events, {key_ctas, slots::threads}, stream, work.rows);
  launch_grid(slots::follow_slots,
              {rows * ceil_div(schedule.slots, slots::threads), slots::threads}, stream, work.rows);
}

}  // namespace flash_dmattn::cuda
