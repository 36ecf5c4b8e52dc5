#include "cuda/schedule/schedule.h"

#include "common/arguments.h"
#include "cuda/attention/params.h"
#include "cuda/selection/selection.h"

namespace flash_dmattn::cuda {
namespace {

// Whether kernels may follow a schedule of the intervals.
bool can_have_schedule(const TileListArgs& args) {
  return args.lists() > 0 && args.intervals.data != nullptr && !args.bound.consecutive;
}

}  // namespace

// ---- Query tile lists ---------------------------------------------------------------------------

ListSchedule::ListSchedule(const Problem& p, const Visibility& visibility, Order order)
    : args_(tile_list_args(p, visibility, query_tile_rows)) {
  args_.by_position = order == Order::by_position;
  if (!can_have_schedule(args_)) return;
  capacity_ = tile_list_capacity(args_);
  // If lists have room for every key (a window as wide as the keys, a prefix, padding) they skip little, and kernels
  // visit the keys from the first to the last faster than they follow lists.
  exists_ = capacity_ < args_.seqlen_k;
  if (exists_) build_bytes_ = tile_lists_workspace_size(args_);
}

void ListSchedule::place(WorkspaceAllocator& workspace) {
  if (!exists_) return;
  buffers_ = take_tile_lists(workspace, args_.lists(), args_.lists() * capacity_);
  build_space_ = workspace.lend(build_bytes_);
}

void ListSchedule::build(const Execution& execution) const {
  if (!exists_) return;
  build_tile_lists(args_, buffers_,
                   with_workspace(execution, {build_space_, build_bytes_}, build_bytes_));
}

QueryTileLists ListSchedule::lists() const {
  return exists_ ? view_of(buffers_, args_) : QueryTileLists{};
}

// ---- Slots --------------------------------------------------------------------------------------

SlotSchedule::SlotSchedule(const Problem& p, const Visibility& visibility,
                           const SlotGeometry& geometry)
    : args_(tile_list_args(p, visibility, geometry.tile_rows)) {
  if (!can_have_schedule(args_)) return;
  TileListArgs two_tiles = args_;
  two_tiles.tile_rows *= 2;
  shape_ = {.rows = args_.batch * args_.heads,
            .seqlen_k = args_.seqlen_k,
            .slots = tile_list_capacity(two_tiles),
            .segments = geometry.segments};
  exists_ = shape_.slots > 0 && 2 * shape_.slots <= args_.seqlen_k;
  if (exists_) build_bytes_ = slot_workspace_size(args_, shape_);
}

void SlotSchedule::place(WorkspaceAllocator& workspace) {
  if (!exists_) return;
  buffers_ = take_key_slots(workspace, shape_);
  build_space_ = workspace.lend(build_bytes_);
}

void SlotSchedule::build(const Execution& execution) const {
  if (!exists_) return;
  assign_slots(args_, shape_, buffers_,
               with_workspace(execution, {build_space_, build_bytes_}, build_bytes_));
}

KeySlots SlotSchedule::slots() const {
  KeySlots slots;
  slots.shape = shape_;
  slots.count = buffers_.count;
  slots.used = buffers_.used;
  slots.arrivals = buffers_.arrivals;
  slots.successor = buffers_.successor;
  slots.starts = buffers_.starts;
  return slots;
}

}  // namespace flash_dmattn::cuda
