#include "cuda/attention/problem.h"
#include "cuda/device_plan.h"
#include "cuda/schedule/schedule.h"
#include "cuda/sm90/backward/plan.h"
#include "cuda/sm90/compiled.h"
#include "cuda/sm90/forward/launch.h"
#include "cuda/stages/stages.h"
#include "family_table.h"

// The family for compute capability 9.0. It multiplies by wgmma tiles that the TMA unit or cp.async copies to shared
// memory.
namespace flash_dmattn::cuda::sm90 {
namespace {

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
  if (p.bias_delay != 0 && is_dense(p.mask_shape) && p.head_dim > 128) {
    return "it has no kernels for a delayed bias under a dense mask with a head_dim above 128";
  }
  return decline_shape(p);
}

class ForwardPlan {
 public:
  std::size_t bytes;

  ForwardPlan(const ForwardArgs& args, const Execution&)
      : schedule_(args.problem, args.in.visibility, ListSchedule::Order::full_first),
        params_(params_of(args)),
        multiprocessors_(current_device().multiprocessors) {
    params_.tile_lists = schedule_.lists();
    choice_ = choose_forward(args.problem.dtype, params_);
    bytes = place(args, nullptr);
  }

  void run(const ForwardArgs& args, const Execution& execution) const {
    const auto stream = static_cast<cudaStream_t>(execution.stream);
    ForwardPlan placed = *this;
    placed.place(args, execution.workspace);
    ForwardParams& params = placed.params_;
    placed.schedule_.build(execution);
    if (choice_.variant.dense == DenseAccess::tiles || has(args.problem.limit_shape))
      pack_mask(args.problem, params.score, stream);
    params.key_ranges = find_key_ranges(args.problem, args.in, placed.key_ranges_, stream);
    dispatch_bucket(choice_.dtype, choice_.head_dim, [&]<class T, int D>() {
      launch_forward<T, D>(choice_, params, placed.workspace_, stream);
    });
  }

  std::string kernel_name() const { return name(choice_); }

 private:
  // Sets the pointers into the workspace, and returns its size. With a null base it only counts.
  std::size_t place(const ForwardArgs& args, void* base) {
    WorkspaceAllocator allocator(base);
    schedule_.place(allocator);
    params_.tile_lists = schedule_.lists();
    const bool has_lists = schedule_.exists();
    key_ranges_ = allocate_key_ranges(args.problem, args.in, has_lists, allocator);
    workspace_ = ForwardWorkspace(choice_, params_, multiprocessors_, allocator);
    params_.score.packed_mask = reads_mask_bytes(choice_, params_)
                                    ? allocate_mask_states(args.problem, allocator)
                                    : allocate_packed_mask(args.problem, has_lists, allocator);
    return allocator.bytes();
  }

  ListSchedule schedule_;
  ForwardParams params_;
  ForwardChoice choice_;
  int multiprocessors_;
  KeyRangeWorkspace key_ranges_;
  ForwardWorkspace workspace_;
};

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
                .plan = make_plan<OnDevice<sm90::ForwardPlan>, ForwardArgs>,
                .names = sm90::forward_names},
    .backward = {.decline = sm90::decline_backward,
                 .plan = make_plan<OnDevice<sm90::BackwardPlan>, BackwardArgs>,
                 .names = sm90::backward_names},
};

}  // namespace flash_dmattn::cuda
