#include "cpu/forward_call.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/dispatch.h"
#include "cpu/make_task.h"
#include "tasks.h"
#include "workspace_allocator.h"

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

struct ForwardLayout {
  ForwardTask task;
  int* splits_left;  // few queries: [B, Hkv, tiles], splits not yet computed
  char* scratch;
  std::int64_t scratch_bytes;
  std::size_t bytes;
};

// Lays out `workspace`; a null one is only measured.
ForwardLayout lay_out(const ForwardArgs& args, const Slots& slots, const Execution& execution,
                      void* workspace) {
  const Kernels& kernels = *chosen().kernels;
  ForwardLayout layout{};
  ForwardTask& t = layout.task;
  static_cast<Task&>(t) = task_of(args.problem, args.in, args.schedule);
  t.slots = slots;
  t.out = rows_of(args.out);
  t.lse = static_cast<float*>(args.lse.data);
  t.lse_low = static_cast<float*>(args.lse_low.data);
  t.splits = splits_of(t);
  WorkspaceAllocator space(workspace);
  if (t.splits > 0) {
    t.split_bytes = kernels.split_bytes(t);
    t.split_sums = space.take<char>(t.batch * t.heads_kv * t.tiles * t.splits * t.split_bytes);
    layout.splits_left = space.take<int>(t.batch * t.heads_kv * t.tiles);
    layout.scratch_bytes = kernels.few_queries_scratch(t);
  } else {
    if (shares_keys(t)) {
      t.packed_block_bytes = kernels.forward_block_bytes(t);
      t.packed_keys = space.take<char>(all_key_blocks(t) * t.packed_block_bytes);
    }
    layout.scratch_bytes = kernels.forward_scratch(t);
  }
  layout.scratch = space.take<char>(layout.scratch_bytes * execution.workers);
  layout.bytes = space.used();
  return layout;
}

}  // namespace

std::size_t forward_workspace_size(const ForwardArgs& args, const Execution& execution,
                                   const Slots& slots) {
  return is_empty(args.problem) ? 0 : lay_out(args, slots, execution, nullptr).bytes;
}

void forward(const ForwardArgs& args, const Execution& execution, const Slots& slots) {
  if (is_empty(args.problem)) return;
  const Kernels& kernels = *chosen().kernels;
  const ForwardLayout layout = lay_out(args, slots, execution, execution.workspace);
  const ForwardTask& t = layout.task;
  const std::int64_t tiles = t.batch * t.heads_kv * t.tiles;
  const auto scratch_of = [&](int worker) {
    return layout.scratch + worker * layout.scratch_bytes;
  };
  if (t.splits > 0) {
    std::fill_n(layout.splits_left, tiles, t.splits);
    for_each_task_in_parts(execution, tiles * t.splits, [&](std::int64_t item, int worker) {
      kernels.few_queries(t, item, scratch_of(worker));
      // The worker of a tile's last split merges them all.
      const std::int64_t tile = item / t.splits;
      std::atomic_ref<int> left(layout.splits_left[tile]);
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
