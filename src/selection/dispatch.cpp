#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/selection/selection.h"
#include "flash_dmattn/error.h"
#include "selection/selection.h"

// Selection and plan where the data is.
namespace flash_dmattn {
namespace {

bool on_gpu(Device device) {
  if (device != Device::cpu && device != Device::cuda) {
    throw InvalidArgument("device", std::to_string(static_cast<int>(device)), "cpu or cuda");
  }
  return device == Device::cuda;
}

void require_gpu(Device device, const char* what) {
  if (!on_gpu(device)) {
    throw InvalidArgument("device", name_of(device), std::string("cuda, for ") + what);
  }
}

}  // namespace

KeyBound key_bound(const SelectionArgs& args) {
  const bool arriving = args.causal && args.selection == Selection::per_query;
  return {.base = std::min(args.window, args.seqlen_k), .per_query = arriving ? 1 : 0};
}

std::size_t select_workspace_size(const SelectionArgs& args, const Execution& execution) {
  return on_gpu(args.device) ? cuda::select_workspace_size(args)
                             : cpu::select_workspace_size(args, execution);
}

void select_key_intervals(const SelectionArgs& args, const Execution& execution) {
  on_gpu(args.device) ? cuda::select_key_intervals(args, execution)
                      : cpu::select_key_intervals(args, execution);
}

std::int64_t key_list_stride(const SelectionArgs& args) {
  require_gpu(args.device, "key lists");
  return cuda::key_list_stride(args);
}

std::size_t select_list_workspace_size(const SelectionArgs& args) {
  require_gpu(args.device, "key lists");
  return cuda::select_list_workspace_size(args);
}

KeyList select_key_list(const SelectionArgs& args, std::int32_t* keys, std::int32_t* count,
                        const Execution& execution) {
  require_gpu(args.device, "key lists");
  return cuda::select_key_list(args, keys, count, execution);
}

std::size_t rank_workspace_size(const RankArgs& args) {
  require_gpu(args.device, "ranks of keys");
  return cuda::rank_workspace_size(args);
}

void rank_keys(const RankArgs& args, const Execution& execution) {
  require_gpu(args.device, "ranks of keys");
  cuda::rank_keys(args, execution);
}

std::size_t plan_workspace_size(const PlanArgs& args, const Execution& execution) {
  return on_gpu(args.device) ? cuda::plan_workspace_size(args)
                             : cpu::plan_workspace_size(args, execution);
}

std::int64_t plan_entries(const PlanArgs& args, const Execution& execution) {
  return on_gpu(args.device) ? cuda::plan_entries(args) : cpu::plan_entries(args, execution);
}

Plan build_plan(const PlanArgs& args, const PlanBuffers& buffers, const Execution& execution) {
  return on_gpu(args.device) ? cuda::build_plan(args, buffers, execution)
                             : cpu::build_plan(args, buffers, execution);
}

std::size_t measure_workspace_size(const PlanArgs& args, const Execution& execution) {
  return on_gpu(args.device) ? cuda::measure_workspace_size(args)
                             : cpu::measure_workspace_size(args, execution);
}

KeyBound measure_key_bound(const PlanArgs& args, const Execution& execution) {
  return on_gpu(args.device) ? cuda::measure_key_bound(args, execution)
                             : cpu::measure_key_bound(args, execution);
}

}  // namespace flash_dmattn
