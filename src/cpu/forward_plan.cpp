#include "cpu/forward_plan.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/tasks.h"
#include "common/workspace_allocator.h"
#include "cpu/make_task.h"

namespace flash_dmattn::cpu {
namespace {

// Keys are split into enough items for this many workers, however many there are (results do not depend on their
// number), but no finer than a few blocks of keys.
constexpr std::int64_t target_items = 64;
constexpr std::int64_t least_split_keys = 4 * block_keys;

int splits_of(const Task& t) {
  if (t.slots.counts == nullptr && !t.few_queries) return 0;
  const std::int64_t tiles = std::max<std::int64_t>(t.batch * t.heads_kv * t.tiles, 1);
  const std::int64_t wanted = (target_items + tiles - 1) / tiles;
  const std::int64_t most = (t.seqlen_k + least_split_keys - 1) / least_split_keys;
  return static_cast<int>(std::clamp<std::int64_t>(std::min(wanted, most), 1, target_items));
}

}  // namespace

ForwardPlan::ForwardPlan(const ForwardArgs& args, const Execution& execution, const Slots& slots)
    : schedule_(args.problem, args.in.visibility, execution) {
  if (is_empty(args.problem)) return;
  const Kernels& kernels = candidate_->kernels_of(args.problem.dtype);
  ForwardTask& t = task_;
  static_cast<Task&>(t) = task_of(args.problem, args.in);
  t.slots = slots;
  if (slots.counts != nullptr && t.bias.data != nullptr) t.bias.batch = slots.row_slots;
  t.out = rows_of(args.out);
  t.lse = static_cast<float*>(args.lse.data);
  t.lse_low = static_cast<float*>(args.lse_low.data);
  t.splits = splits_of(t);
  if (t.splits > 0) {
    t.split_bytes = kernels.split_bytes(t);
    scratch_bytes_ = kernels.few_queries_scratch(t);
  } else {
    if (shares_keys(t)) t.packed_block_bytes = kernels.forward_block_bytes(t);
    scratch_bytes_ = kernels.forward_scratch(t);
  }
  bytes = place(nullptr, execution.workers);
}

std::size_t ForwardPlan::place(void* base, int workers) {
  ForwardTask& t = task_;
  WorkspaceAllocator space(base);
  schedule_.place(space);
  t.tile_lists = schedule_.lists();
  if (t.splits > 0) {
    t.split_sums = space.take<char>(t.batch * t.heads_kv * t.tiles * t.splits * t.split_bytes);
    splits_left_ = space.take<int>(t.batch * t.heads_kv * t.tiles);
  } else if (shares_keys(t)) {
    t.packed_keys = space.take<char>(all_key_blocks(t) * t.packed_block_bytes);
  }
  scratch_ = space.take<char>(scratch_bytes_ * workers);
  return space.bytes();
}

void ForwardPlan::run(const ForwardArgs& args, const Execution& execution) const {
  if (is_empty(args.problem)) return;
  const Kernels& kernels = candidate_->kernels_of(args.problem.dtype);
  ForwardPlan placed = *this;
  placed.place(execution.workspace, execution.workers);
  placed.schedule_.build(execution);
  const ForwardTask& t = placed.task_;
  const std::int64_t tiles = t.batch * t.heads_kv * t.tiles;
  const auto scratch_of = [&](int worker) { return placed.scratch_ + worker * scratch_bytes_; };
  if (t.splits > 0) {
    std::fill_n(placed.splits_left_, tiles, t.splits);
    for_each_task_in_parts(execution, tiles * t.splits, [&](std::int64_t item, int worker) {
      kernels.few_queries(t, item, scratch_of(worker));
      // The worker of a tile's last split merges them all.
      const std::int64_t tile = item / t.splits;
      std::atomic_ref<int> left(placed.splits_left_[tile]);
      if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) kernels.merge_splits(t, tile);
    });
    return;
  }
  if (t.packed_keys != nullptr) {
    for_each_task(execution, all_key_blocks(t),
                  [&](std::int64_t item, int) { kernels.pack_forward(t, item); });
  }
  for_each_task(execution, tiles, [&](std::int64_t item, int worker) {
    kernels.forward(t, item, scratch_of(worker));
  });
}

}  // namespace flash_dmattn::cpu
