#include "cuda/attention/problem.h"
#include "cuda/sm90/backward/launch.h"
#include "cuda/sm90/forward/launch.h"
#include "cuda/stages/stages.h"
#include "family_table.h"

// The family for compute capability 9.0. It multiplies by wgmma tiles that the TMA unit or cp.async copies to shared
// memory.
namespace flash_dmattn::cuda::sm90 {
namespace {

constexpr bool is_compiled = FLASH_DMATTN_HAS_SM90 != 0;

std::string decline_device(const DeviceProperties& device) {
  if (device.compute_capability != 90) {
    return "it needs compute capability 9.0, and the GPU has " + compute_capability(device);
  }
  constexpr int needed_bytes = 227 * 1024;
  if (device.shared_bytes < needed_bytes) {
    return "it needs 227 KB of shared memory for a block";
  }
  if (!is_compiled) return "this build has no kernels for compute capability 9.0";
  return "";
}

std::string decline_forward(const Problem& p) {
  if (has(p.limit_shape) && !has_ranks(head_dim_bucket(static_cast<int>(p.head_dim)))) {
    return "it has no kernels for ranks with a head_dim above 128";
  }
  return decline_shape(p);
}

struct ForwardCall {
  ForwardParams params;
  ForwardChoice choice;
  KeyRangeWorkspace key_ranges;
  ForwardWorkspace workspace;

  ForwardCall(const ForwardArgs& args, const DeviceProperties& device,
              WorkspaceAllocator& allocator)
      : params(params_of(args)),
        choice(choose_forward(args.problem.dtype, params)),
        key_ranges(allocate_key_ranges(args.problem, args.in, has_lists(), allocator)),
        workspace(choice, params, device.multiprocessors, allocator) {
    params.score.packed_mask = reads_mask_bytes(params)
                                   ? allocate_mask_states(args.problem, allocator)
                                   : allocate_packed_mask(args.problem, has_lists(), allocator);
  }

  bool has_lists() const { return params.tile_lists.keys != nullptr; }
};

std::size_t forward_workspace_size(const ForwardArgs& args, const DeviceProperties& device) {
  WorkspaceAllocator allocator(nullptr);
  ForwardCall(args, device, allocator);
  return allocator.used();
}

void forward(const ForwardArgs& args, const DeviceProperties& device, const Execution& execution) {
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  WorkspaceAllocator allocator(execution.workspace);
  ForwardCall call(args, device, allocator);
  const ForwardChoice& choice = call.choice;
  if (choice.variant.dense == DenseAccess::tiles || has(args.problem.limit_shape))
    pack_mask(args.problem, call.params.score, stream);
  call.params.key_ranges = find_key_ranges(args.problem, args.in, call.key_ranges, stream);
  const auto launch_dtype = [&]<class T>() {
    if constexpr (is_compiled) {
      switch (choice.head_dim) {
        case 64: return launch_forward<T, 64>(choice, call.params, call.workspace, stream);
        case 128: return launch_forward<T, 128>(choice, call.params, call.workspace, stream);
        default: return launch_forward<T, 256>(choice, call.params, call.workspace, stream);
      }
    }
  };
  choice.dtype == DType::bf16 ? launch_dtype.template operator()<__nv_bfloat16>()
                              : launch_dtype.template operator()<__half>();
}

std::string forward_name(const ForwardArgs& args, const DeviceProperties&) {
  return name(choose_forward(args.problem.dtype, params_of(args)));
}

std::vector<std::string> forward_names(const DeviceProperties&) {
  std::vector<std::string> names;
  for (const ForwardChoice& choice : forward_choices()) names.push_back(name(choice));
  return names;
}

}  // namespace
}  // namespace flash_dmattn::cuda::sm90

namespace flash_dmattn::cuda {

const Family sm90_family = {
    .name = "sm90",
    .decline_device = sm90::decline_device,
    .forward = {.decline = sm90::decline_forward,
                .schedule = {ScheduleKind::query_tile_lists, query_tile_rows},
                .workspace_size = sm90::forward_workspace_size,
                .run = sm90::forward,
                .name = sm90::forward_name,
                .names = sm90::forward_names},
    .backward = {.decline = sm90::decline_backward,
                 .schedule = {ScheduleKind::key_slots, sm90::slot_tile_rows, sm90::slot_segments},
                 .workspace_size = sm90::backward_workspace_size,
                 .run = sm90::run_backward,
                 .name = sm90::backward_name,
                 .names = sm90::backward_names},
};

}  // namespace flash_dmattn::cuda
