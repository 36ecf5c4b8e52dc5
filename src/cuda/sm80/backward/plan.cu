#include "cuda/sm80/backward/plan.h"

#include <stdexcept>

#include "cuda/attention/problem.h"
#include "cuda/device_plan.h"
#include "cuda/family.h"
#include "cuda/primitives/launch.h"
#include "cuda/sm80/backward/postprocess.cuh"
#include "cuda/sm80/backward/workspace.h"
#include "cuda/sm80/dispatch.h"
#include "cuda/sm80/launch.h"

namespace flash_dmattn::cuda::sm80 {
namespace {

bool is_dbias_aligned(const BackwardArgs& args) {
  const Problem& p = args.problem;
  const auto is_aligned = [&](const void* data, const std::array<std::int64_t, 4>& stride) {
    return broadcast_of(p, p.bias_shape, data, stride, size_of(p.bias_dtype)).aligned_x4;
  };
  return is_aligned(args.in.bias.data, args.in.bias.stride) &&
         (args.dbias.data == nullptr || is_aligned(args.dbias.data, args.dbias.stride));
}

// The parameters of a call with the pointers into its workspace.
BackwardParams params_in(const BackwardWorkspace& workspace, const BackwardArgs& args,
                         BackwardParams params) {
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
    const BackwardParams params = params_in(workspace, args, params_);
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

}  // namespace

std::string decline_backward(const Problem& p) { return decline_shape(p, min_tile_rows); }

void plan_backward(const BackwardArgs& args, const Execution& execution, Plan<BackwardArgs>& plan) {
  make_plan<OnDevice<BackwardPlan>>(args, execution, plan);
}

std::vector<std::string> backward_names(const DeviceProperties& device) {
  return names_of(backward_choices(shared_class(device)));
}

}  // namespace flash_dmattn::cuda::sm80
