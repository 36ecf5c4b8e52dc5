#include <stdexcept>

#include "cuda/attention/problem.h"
#include "cuda/device_plan.h"
#include "cuda/primitives/launch.h"
#include "cuda/sm80/backward/postprocess.cuh"
#include "cuda/sm80/dispatch.h"
#include "cuda/sm80/few_queries/few_queries.h"
#include "cuda/sm80/launch.h"
#include "cuda/sm80/workspace.h"
#include "family_table.h"

// The family for every GPU since Ampere. It multiplies by mma.sync tiles that cp.async copies to shared memory.
namespace flash_dmattn::cuda::sm80 {
namespace {

std::string decline_device(const DeviceProperties& device) {
  if (device.compute_capability < 80) {
    return "it needs compute capability 8.0, and the GPU has " + compute_capability(device);
  }
  if (!has_kernels(shared_class(device))) {
    return "this build has no kernels for a GPU with " +
           std::to_string(device.shared_bytes / 1024) + " KB of shared memory for a block";
  }
  return "";
}

template <class Choices>
std::vector<std::string> names_of(const Choices& choices) {
  std::vector<std::string> names;
  for (const auto& choice : choices) names.push_back(name(choice));
  return names;
}

// ---- Forward --------------------------------------------------------------------------------------------

std::string decline_forward(const Problem& p) {
  const DeviceProperties& device = current_device();
  if (omits_forward(head_dim_bucket(static_cast<int>(p.head_dim)), device)) {
    return "this build has no kernels of its forward for compute capability " +
           compute_capability(device) + " and such a head_dim, which a newer family computes";
  }
  return decline(p);
}

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

std::vector<std::string> forward_names(const DeviceProperties& device) {
  std::vector<ForwardChoice> choices = forward_choices(shared_class(device));
  std::erase_if(choices, [&](const ForwardChoice& c) { return omits_forward(c.head_dim, device); });
  return names_of(choices);
}

// ---- Backward -------------------------------------------------------------------------------------------

bool is_dbias_aligned(const BackwardArgs& args) {
  const Problem& p = args.problem;
  const auto is_aligned = [&](const void* data, const std::array<std::int64_t, 4>& stride) {
    return broadcast_of(p, p.bias_shape, data, stride, size_of(p.bias_dtype)).aligned_x4;
  };
  return is_aligned(args.in.bias.data, args.in.bias.stride) &&
         (args.dbias.data == nullptr || is_aligned(args.dbias.data, args.dbias.stride));
}

BackwardParams with_workspace(BackwardParams params, const BackwardArgs& args,
                              const BackwardWorkspace& workspace) {
  const Problem& p = args.problem;
  params.tile_lists = workspace.schedule.lists();
  params.score.packed_mask = workspace.packed_mask;
  params.lse_log2 = workspace.lse_log2;
  params.lse_log2_low = workspace.lse_log2_low;
  params.delta = workspace.delta;
  params.flags = workspace.zeroed.flags;
  params.dbias_accumulates = workspace.zeroed.dbias_accum != nullptr;
  if (args.dbias.data == nullptr) return params;
  params.dbias = params.dbias_accumulates ? dbias_sums(p, workspace.zeroed.dbias_accum)
                                          : broadcast_of(p, p.bias_shape, args.dbias.data,
                                                         args.dbias.stride, size_of(p.bias_dtype));
  return params;
}

template <class T>
void store_rows(const Shape& shape, const float* sums, const Tensor4& to, int columns, float scale,
                bool saturate, cudaStream_t stream) {
  if (to.data == nullptr) return;
  const BwdPostprocessDkv<T> store{shape, sums, rows_of(to), columns, scale, saturate};
  for_each(store.items(), store, stream);
}

void run_query_major(const BackwardArgs& args, const BackwardChoice& choice,
                     const BackwardWorkspace& workspace, const BackwardParams& common,
                     cudaStream_t stream) {
  const Problem& p = args.problem;
  const ZeroedArrays& zeroed = workspace.zeroed;
  QueryMajorParams params(common);
  params.key_ranges = find_key_ranges(p, args.in, workspace.key_ranges, stream);
  params.order = zeroed.semaphore;
  if (args.dk.data != nullptr) params.dk_accum = zeroed.dk_accum;
  if (args.dv.data != nullptr) params.dv_accum = zeroed.dv_accum;
  dispatch(choice, [&]<class T, int D, SharedClass S>() {
    launch_backward<T, D, S>(choice, params, stream);
    const Shape& shape = params.shape;
    store_rows<T>(shape, zeroed.dk_accum, args.dk, shape.head_dim, params.score.scale,
                  params.saturate, stream);
    store_rows<T>(shape, zeroed.dv_accum, args.dv, shape.value_dim, 1, params.saturate, stream);
  });
}

void run_key_major(const BackwardArgs& args, const BackwardChoice& choice,
                   const BackwardWorkspace& workspace, const BackwardParams& common,
                   cudaStream_t stream) {
  KeyMajorParams params(common);
  if (args.dq.data != nullptr) {
    params.order = workspace.zeroed.semaphore;
    params.dq_accum = workspace.zeroed.dq_accum;
  }
  pack_mask(args.problem, params.score, stream);
  dispatch(choice, [&]<class T, int D, SharedClass S>() {
    if constexpr (has_key_major_backward(D, S)) {
      launch_backward<T, D, S>(choice, params, stream);
      if (params.dq.data == nullptr) return;
      const BwdPostprocessDq<T, DqAccumLayout<D>> store{params.shape,    params.dq_accum,
                                                        params.dq,       params.score.scale,
                                                        params.saturate, params.flags};
      for_each(store.items(), store, stream);
    } else {
      throw std::logic_error("no such kernel: " + name(choice));
    }
  });
}

class BackwardPlan {
 public:
  std::size_t bytes;

  BackwardPlan(const BackwardArgs& args, const Execution&)
      : schedule_(args.problem, args.in.visibility,
                  args.problem.deterministic ? ListSchedule::Order::by_position
                                             : ListSchedule::Order::full_first),
        choice_(choose_backward(args.problem,
                                {.has_lists = schedule_.exists(),
                                 .dbias_aligned = is_dbias_aligned(args),
                                 .wants_dq = args.dq.data != nullptr},
                                shared_class(current_device()))),
        params_(params_of(args)) {
    bytes = BackwardWorkspace(args.problem, args.in, schedule_, choice_, nullptr).bytes;
  }

  void run(const BackwardArgs& args, const Execution& execution) const {
    const Problem& p = args.problem;
    const auto stream = static_cast<cudaStream_t>(execution.stream);
    const bool adds_in_memory = !is_key_major(choice_.loop) || args.dq.data != nullptr;
    if (p.deterministic && adds_in_memory && !choice_.ordered) {
      throw std::logic_error("a deterministic backward without an order: " + name(choice_));
    }
    const BackwardWorkspace workspace(p, args.in, schedule_, choice_, execution.workspace);
    const BackwardParams params = with_workspace(params_, args, workspace);
    const bool wants_dbias = params.dbias.data != nullptr;

    workspace.schedule.build(execution);
    check(cudaMemsetAsync(workspace.zeroed_begin, 0, workspace.zeroed_bytes, stream),
          "cudaMemsetAsync");
    // A main loop that follows lists stores only the elements of dbias that it visits.
    if (wants_dbias && !params.dbias_accumulates && schedule_.exists())
      store_dbias(args, nullptr, stream);
    preprocess_backward(params, p.dtype, stream);
    is_key_major(choice_.loop) ? run_key_major(args, choice_, workspace, params, stream)
                               : run_query_major(args, choice_, workspace, params, stream);
    fix_gradients(params, p.dtype, stream);
    if (wants_dbias && params.dbias_accumulates)
      store_dbias(args, workspace.zeroed.dbias_accum, stream);
  }

  std::string kernel_name() const { return name(choice_); }

 private:
  ListSchedule schedule_;
  BackwardChoice choice_;
  BackwardParams params_;
};

std::vector<std::string> backward_names(const DeviceProperties& device) {
  return names_of(backward_choices(shared_class(device)));
}

}  // namespace
}  // namespace flash_dmattn::cuda::sm80

namespace flash_dmattn::cuda {

const Family sm80_family = {
    .name = "sm80",
    .decline_device = sm80::decline_device,
    .forward = {.decline = sm80::decline_forward,
                .plan = make_plan<OnDevice<sm80::ForwardPlan>, ForwardArgs>,
                .names = sm80::forward_names},
    .few_queries = {.decline = sm80::few_queries::decline,
                    .plan = sm80::few_queries::plan_split,
                    .names = sm80::few_queries::split_names},
    .backward = {.decline = sm80::decline,
                 .plan = make_plan<OnDevice<sm80::BackwardPlan>, BackwardArgs>,
                 .names = sm80::backward_names},
    .decode_step = {.decline = sm80::few_queries::decline_cache,
                    .plan = sm80::few_queries::plan_step,
                    .names = sm80::few_queries::step_names},
};

}  // namespace flash_dmattn::cuda
