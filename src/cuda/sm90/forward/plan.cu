#include "cuda/sm90/forward/plan.h"

#include "cuda/attention/problem.h"
#include "cuda/device_plan.h"
#include "cuda/family.h"
#include "cuda/schedule/schedule.h"
#include "cuda/sm90/dispatch.h"
#include "cuda/sm90/forward/choice.h"
#include "cuda/sm90/forward/launch.h"
#include "cuda/sm90/forward/repetition.cuh"
#include "cuda/sm90/forward/work_tile.cuh"
#include "cuda/stages/stages.h"

namespace flash_dmattn::cuda::sm90 {
namespace {

// The plan of a forward: its kernel, the parameters of its launches, and its arrays in the caller's workspace.
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
    if (choice_.variant.dense == DenseAccess::tiles) pack_mask(args.problem, params.score, stream);
    params.key_ranges = find_key_ranges(args.problem, args.in, placed.key_ranges_, stream);
    dispatch_bucket(choice_, [&]<class T, int D>() {
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

}  // namespace

ForwardWorkspace::ForwardWorkspace(const ForwardChoice& choice, const ForwardParams& p,
                                   int multiprocessors, WorkspaceAllocator& workspace) {
  const ForwardVariant& variant = choice.variant;
  const int rows = forward_policy(choice.head_dim, choice.value_dim, variant).rows();
  const Repetition repetition = repetition_of(choice.head_dim, choice.value_dim, variant);
  const bool is_repeated = sm90::is_repeated(repetition) && may_have_large_rows(p.score);
  const bool is_short = can_be_short(variant) &&
                        WorkTile::count(p.shape, rows) <= multiprocessors &&
                        (!is_repeated || repetition == Repetition::by_block);
  const bool computes_key_info = is_short && can_compute_key_info(variant) &&
                                 p.shape.seqlen_k <= most_computed_key_info &&
                                 p.score.bias_delay == 0;
  if (variant.has_key_info && !computes_key_info)
    info = allocate_key_info(p.shape, p.score, workspace, true, is_repeated);
  if (is_short) return;
  next_work = workspace.take<int>(2);
  needs_fix = workspace.take<std::uint32_t>(1);
  if (is_repeated) has_large_rows = workspace.take<std::uint32_t>(1);
}

std::string decline_forward(const Problem& p) {
  if (p.bias_delay != 0 && is_dense(p.mask_shape) && p.head_dim > 128) {
    return "it has no kernels for a delayed bias under a dense mask with a head_dim above 128";
  }
  return decline_shape(p, 64);
}

void plan_forward(const ForwardArgs& args, const Execution& execution, Plan<ForwardArgs>& plan) {
  make_plan<OnDevice<ForwardPlan>>(args, execution, plan);
}

std::vector<std::string> forward_names(const DeviceProperties&) {
  return names_of(all_choices(forward_variants));
}

}  // namespace flash_dmattn::cuda::sm90
