#include <algorithm>
#include <cstdint>
#include <string>

#include "arguments.h"
#include "cuda/selection/best_keys.h"
#include "cuda/selection/device.cuh"
#include "cuda/selection/selection.h"

// Makes a global selection a list, which is the tile list of the intervals of a single query that sees every key.
namespace flash_dmattn::cuda {
namespace {

SelectionArgs for_one_query(const SelectionArgs& args, KeyInterval* intervals) {
  SelectionArgs one = args;
  one.seqlen_q = 1;
  one.causal = false;
  one.rule.selection = Selection::global;
  one.intervals = intervals;
  return one;
}

TileListArgs list_args(const SelectionArgs& select) {
  return {.batch = select.batch,
          .heads = select.heads,
          .seqlen_q = 1,
          .seqlen_k = select.seqlen_k,
          .tile_rows = 1,
          .causal = false,
          .intervals = {select.intervals, select.heads * select.seqlen_k, select.seqlen_k},
          .bound = {std::min(select.rule.window, select.seqlen_k), 0}};
}

struct ListWorkspace {
  KeyInterval* intervals;
  TileListBuffers lists;
  char* step;  // workspace of the selection, then of the lists
  std::size_t step_bytes;
  std::size_t bytes;

  ListWorkspace(const SelectionArgs& args, void* base) {
    WorkspaceAllocator allocator(base);
    const std::int64_t rows = args.batch * args.heads;
    intervals = allocator.take<KeyInterval>(rows * args.seqlen_k);
    lists.begin = allocator.take<std::int64_t>(rows);
    lists.full = allocator.take<std::int32_t>(rows);
    const SelectionArgs select = for_one_query(args, nullptr);
    step_bytes =
        std::max(BestKeys(select).bytes, cuda::tile_lists_workspace_size(list_args(select)));
    step = allocator.take<char>(static_cast<std::int64_t>(step_bytes));
    bytes = allocator.used();
  }
};

// Throws InvalidArgument unless a list can express the selection.
void require_list(const SelectionArgs& args) {
  const KeySelection& rule = args.rule;
  if (rule.recent_window > 0) {
    throw InvalidArgument("recent_window", std::to_string(rule.recent_window), "0 for a key list");
  }
  if (rule.sink_tokens > 0) {
    throw InvalidArgument("sink_tokens", std::to_string(rule.sink_tokens), "0 for a key list");
  }
  if (rule.head_windows != nullptr) {
    throw InvalidArgument("head_windows", "a window for each head", "null for a key list");
  }
  cuda::validate(for_one_query(args, nullptr));
}

}  // namespace

std::int64_t key_list_stride(const SelectionArgs& args) {
  require_list(args);
  return tile_list_capacity(list_args(for_one_query(args, nullptr)));
}

std::size_t select_list_workspace_size(const SelectionArgs& args) {
  require_list(args);
  return ListWorkspace(args, nullptr).bytes;
}

KeyList select_key_list(const SelectionArgs& args, std::int32_t* keys, std::int32_t* count,
                        const Execution& execution) {
  require_workspace(execution, cuda::select_list_workspace_size(args));
  require_pointer("scores", args.scores, args.batch * args.heads * args.seqlen_k > 0);
  const ListWorkspace workspace(args, execution.workspace);
  const SelectionArgs select = for_one_query(args, workspace.intervals);
  Execution step = execution;
  step.workspace = workspace.step;
  step.workspace_bytes = workspace.step_bytes;
  BestKeys(select).run(select, step);
  TileListBuffers buffers = workspace.lists;
  buffers.keys = keys;
  buffers.count = count;
  cuda::build_tile_lists(list_args(select), buffers, step);
  return {.keys = keys, .count = count, .stride = cuda::key_list_stride(args)};
}

}  // namespace flash_dmattn::cuda
