#include <algorithm>
#include <cstdint>

#include "arguments.h"
#include "cuda/selection/device.cuh"
#include "cuda/selection/selection.h"

// A global selection as a list: the plan of the intervals of a single query that sees every key.
namespace flash_dmattn::cuda {
namespace {

SelectionArgs for_one_query(const SelectionArgs& args, KeyInterval* intervals) {
  SelectionArgs one = args;
  one.seqlen_q = 1;
  one.causal = false;
  one.selection = Selection::global;
  one.intervals = intervals;
  return one;
}

PlanArgs plan_args(const SelectionArgs& select) {
  return {.device = Device::cuda,
          .batch = select.batch,
          .heads = select.heads,
          .seqlen_q = 1,
          .seqlen_k = select.seqlen_k,
          .tile_rows = 1,
          .causal = false,
          .intervals = {select.intervals, select.heads * select.seqlen_k, select.seqlen_k},
          .bound = {std::min(select.window, select.seqlen_k), 0},
          .list = {}};
}

struct Workspace {
  KeyInterval* intervals;
  PlanBuffers plan;
  char* step;  // of selection, then of the plan
  std::size_t step_bytes;
  std::size_t bytes;

  Workspace(const SelectionArgs& args, void* base) {
    Carver carver(base);
    const std::int64_t rows = args.batch * args.heads;
    intervals = carver.take<KeyInterval>(rows * args.seqlen_k);
    plan.begin = carver.take<std::int64_t>(rows);
    plan.full = carver.take<std::int32_t>(rows);
    const SelectionArgs select = for_one_query(args, nullptr);
    step_bytes =
        std::max(cuda::select_workspace_size(select), cuda::plan_workspace_size(plan_args(select)));
    step = carver.take<char>(static_cast<std::int64_t>(step_bytes));
    bytes = carver.used();
  }
};

}  // namespace

std::int64_t key_list_stride(const SelectionArgs& args) {
  return plan_capacity(plan_args(for_one_query(args, nullptr)));
}

std::size_t select_list_workspace_size(const SelectionArgs& args) {
  return Workspace(args, nullptr).bytes;
}

KeyList select_key_list(const SelectionArgs& args, std::int32_t* keys, std::int32_t* count,
                        const Execution& execution) {
  require_workspace(execution, cuda::select_list_workspace_size(args));
  const Workspace workspace(args, execution.workspace);
  const SelectionArgs select = for_one_query(args, workspace.intervals);
  Execution step = execution;
  step.workspace = workspace.step;
  step.workspace_bytes = workspace.step_bytes;
  cuda::select_key_intervals(select, step);
  PlanBuffers buffers = workspace.plan;
  buffers.keys = keys;
  buffers.count = count;
  cuda::build_plan(plan_args(select), buffers, step);
  return {.keys = keys, .count = count, .stride = cuda::key_list_stride(args)};
}

}  // namespace flash_dmattn::cuda
