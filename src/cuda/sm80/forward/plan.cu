#include "cuda/sm80/forward/plan.h"

#include "cuda/attention/problem.h"
#include "cuda/device_plan.h"
#include "cuda/family.h"
#include "cuda/schedule/schedule.h"
#include "cuda/sm80/dispatch.h"
#include "cuda/sm80/launch.h"
#include "cuda/stages/stages.h"

namespace flash_dmattn::cuda::sm80 {
namespace {

// The plan of a forward: its kernel, the parameters of its launches, and its arrays in the caller's workspace.
class ForwardPlan {
 public:
  std::size_t bytes;

  ForwardPlan(const ForwardArgs& args, const Execution&)
      : schedule_(args.problem, args.in.visibility, ListSchedule::Order::full_first),
        params_(cuda::params_of(args)) {
    bytes = place(args, nullptr);
    choice_ = choose_forward(args.problem, params_, shared_class(current_device()));
  }

  void run(const ForwardArgs& args, const Execution& execution) const {
    const Problem& p = args.problem;
    const auto stream = static_cast<cudaStream_t>(execution.stream);
    ForwardPlan placed = *this;
    placed.place(args, execution.workspace);
    ForwardParams& params = placed.params_;
    placed.schedule_.build(execution);
    pack_mask(p, params.score, stream);
    params.key_ranges = find_key_ranges(p, args.in, placed.key_ranges_, stream);
    dispatch(choice_, [&]<class T, int D, SharedClass S>() {
      if constexpr (has_forward(D, S)) launch_forward<T, D, S>(choice_.loop, params, stream);
    });
  }

  std::string kernel_name() const { return name(choice_); }

 private:
  // Sets the pointers into the workspace, and returns its size. With a null base it only counts.
  std::size_t place(const ForwardArgs& args, void* base) {
    WorkspaceAllocator workspace(base);
    schedule_.place(workspace);
    params_.tile_lists = schedule_.lists();
    const bool has_lists = schedule_.exists();
    params_.score.packed_mask = allocate_packed_mask(args.problem, has_lists, workspace);
    key_ranges_ = allocate_key_ranges(args.problem, args.in, has_lists, workspace);
    return workspace.bytes();
  }

  ListSchedule schedule_;
  ForwardParams params_;
  KeyRangeWorkspace key_ranges_;
  ForwardChoice choice_;
};

}  // namespace

std::string decline_forward(const Problem& p) {
  const DeviceProperties& device = current_device();
  if (omits_forward(head_dim_bucket(static_cast<int>(p.head_dim)), device)) {
    return "this build has no kernels of its forward for compute capability " +
           compute_capability(device) + " and such a head_dim, which a newer family computes";
  }
  return decline_shape(p, min_tile_rows);
}

void plan_forward(const ForwardArgs& args, const Execution& execution, Plan<ForwardArgs>& plan) {
  make_plan<OnDevice<ForwardPlan>>(args, execution, plan);
}

std::vector<std::string> forward_names(const DeviceProperties& device) {
  std::vector<ForwardChoice> choices = forward_choices(shared_class(device));
  std::erase_if(choices, [&](const ForwardChoice& c) { return omits_forward(c.head_dim, device); });
  return names_of(choices);
}

}  // namespace flash_dmattn::cuda::sm80
