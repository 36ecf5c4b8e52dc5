#include <algorithm>
#include <stdexcept>

#include "cuda/attention/problem.h"
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

template <class Args>
bool has_lists(const Args& args) {
  return !args.schedule.empty();
}

ForwardParams params_of(const ForwardArgs& args, const ForwardWorkspace& workspace) {
  ForwardParams params = cuda::params_of(args);
  params.score.packed_mask = workspace.packed_mask;
  return params;
}

std::size_t forward_workspace_size(const ForwardArgs& args, const DeviceProperties&) {
  return ForwardWorkspace(args.problem, args.in, has_lists(args), nullptr).bytes;
}

void forward(const ForwardArgs& args, const DeviceProperties& device, const Execution& execution) {
  const Problem& p = args.problem;
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  const ForwardWorkspace workspace(p, args.in, has_lists(args), execution.workspace);
  ForwardParams params = params_of(args, workspace);
  const ForwardChoice choice = choose_forward(p, params, shared_class(device));

  pack_mask(p, params.score, stream);
  params.key_ranges = find_key_ranges(p, args.in, workspace.key_ranges, stream);
  dispatch(choice, [&]<class T, int D, SharedClass S>() {
    if constexpr (has_forward(D, S)) launch_forward<T, D, S>(choice.loop, params, stream);
  });
}

std::string forward_name(const ForwardArgs& args, const DeviceProperties& device) {
  const ForwardWorkspace workspace(args.problem, args.in, has_lists(args), nullptr);
  return name(choose_forward(args.problem, params_of(args, workspace), shared_class(device)));
}

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

BackwardChoice choose(const BackwardArgs& args, const DeviceProperties& device) {
  return choose_backward(args.problem,
                         {.has_lists = has_lists(args),
                          .dbias_aligned = is_dbias_aligned(args),
                          .wants_dq = args.dq.data != nullptr},
                         shared_class(device));
}

BackwardParams params_of(const BackwardArgs& args, const BackwardWorkspace& workspace) {
  const Problem& p = args.problem;
  BackwardParams params = cuda::params_of(args);
  params.score.packed_mask = workspace.packed_mask;
  params.tile_lists = query_tile_lists(args.schedule, args.in.visibility.key_list, query_tile_rows);
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
void store_rows(const Shape& shape, const float* sums, const Tensor4& to, float scale,
                bool saturate, cudaStream_t stream) {
  if (to.data == nullptr) return;
  const BwdPostprocessDkv<T> store{shape, sums, rows_of(to), scale, saturate};
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
    store_rows<T>(params.shape, zeroed.dk_accum, args.dk, params.score.scale, params.saturate,
                  stream);
    store_rows<T>(params.shape, zeroed.dv_accum, args.dv, 1, params.saturate, stream);
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

void backward(const BackwardArgs& args, const DeviceProperties& device,
              const Execution& execution) {
  const Problem& p = args.problem;
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  const BackwardChoice choice = choose(args, device);
  const bool adds_in_memory = !is_key_major(choice.loop) || args.dq.data != nullptr;
  if (p.deterministic && adds_in_memory && !choice.ordered) {
    throw std::logic_error("a deterministic backward without an order: " + name(choice));
  }
  const BackwardWorkspace workspace(p, args.in, has_lists(args), choice, execution.workspace);
  const BackwardParams params = params_of(args, workspace);
  const bool wants_dbias = params.dbias.data != nullptr;

  check(cudaMemsetAsync(workspace.zeroed_begin, 0, workspace.zeroed_bytes, stream),
        "cudaMemsetAsync");
  // A main loop that follows lists stores only the elements of dbias that it visits.
  if (wants_dbias && !params.dbias_accumulates && has_lists(args))
    store_dbias(args, nullptr, stream);
  preprocess_backward(params, p.dtype, stream);
  is_key_major(choice.loop) ? run_key_major(args, choice, workspace, params, stream)
                            : run_query_major(args, choice, workspace, params, stream);
  fix_gradients(params, p.dtype, stream);
  if (wants_dbias && params.dbias_accumulates)
    store_dbias(args, workspace.zeroed.dbias_accum, stream);
}

// The workspace suffices for any set of gradients and any alignment of dbias.
std::size_t backward_workspace_size(const BackwardArgs& args, const DeviceProperties& device) {
  const bool lists = has_lists(args);
  const auto bytes = [&](bool aligned) {
    const BackwardChoice choice = choose_backward(
        args.problem, {.has_lists = lists, .dbias_aligned = aligned}, shared_class(device));
    return BackwardWorkspace(args.problem, args.in, lists, choice, nullptr).bytes;
  };
  const bool is_known = args.dbias.data != nullptr && is_dbias_aligned(args);
  return is_known ? bytes(true) : std::max(bytes(true), bytes(false));
}

std::string backward_name(const BackwardArgs& args, const DeviceProperties& device) {
  return name(choose(args, device));
}

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
                .schedule = {ScheduleKind::query_tile_lists, query_tile_rows},
                .workspace_size = sm80::forward_workspace_size,
                .run = sm80::forward,
                .name = sm80::forward_name,
                .names = sm80::forward_names},
    .few_queries = {.decline = sm80::few_queries::decline,
                    .schedule = {ScheduleKind::query_tile_lists, query_tile_rows},
                    .workspace_size = sm80::few_queries::workspace_size,
                    .run = sm80::few_queries::run,
                    .name = sm80::few_queries::name,
                    .names = sm80::few_queries::names},
    .backward = {.decline = sm80::decline,
                 .schedule = {ScheduleKind::query_tile_lists, query_tile_rows},
                 .workspace_size = sm80::backward_workspace_size,
                 .run = sm80::backward,
                 .name = sm80::backward_name,
                 .names = sm80::backward_names},
    .decode_step = {.decline = sm80::few_queries::decline_cache,
                    .workspace_size = sm80::few_queries::step_workspace_size,
                    .run = sm80::few_queries::run_step,
                    .name = sm80::few_queries::step_name,
                    .names = sm80::few_queries::step_names},
};

}  // namespace flash_dmattn::cuda
