#include "cuda/sm80/few_queries/few_queries.h"

#include <algorithm>
#include <limits>

#include "cuda/attention/problem.h"
#include "cuda/primitives/math.cuh"
#include "cuda/sm80/dispatch.h"
#include "cuda/sm80/few_queries/launch.h"
#include "cuda/stages/stages.h"
#include "flash_dmattn/error.h"
#include "selection/schedule_contents.h"

namespace flash_dmattn::cuda::sm80::few_queries {
namespace {

// Allocates memory for the sums of the blocks, unless a cluster adds them.
void allocate_sums(const Problem& p, const Choice& choice, Params& params,
                   WorkspaceAllocator& workspace) {
  if (params.split.in_cluster) return;
  const std::int64_t parts = p.batch * p.heads_q * p.seqlen_q * params.split.splits;
  params.sums = workspace.take<RowSums>(parts);
  params.outs = workspace.take<float>(parts * choice.head_dim);
}

// Everything about a call, with its workspace at `base`, which may be null.
struct Call {
  Choice choice;
  Params params;
  KeyRangeWorkspace key_ranges;
  std::size_t bytes;

  Call(const ForwardArgs& args, const DeviceProperties& device, void* base)
      : choice(choose(args.problem, shared_class(device))), params(cuda::params_of(args)) {
    const Problem& p = args.problem;
    mark_elementwise(params.score, p);
    const std::int64_t most_keys =
        args.schedule.empty() ? p.seqlen_k
                              : std::min(p.seqlen_k, ScheduleContents::of(args.schedule).capacity);
    params.split = split_keys(p, policy(choice), most_keys, device);
    WorkspaceAllocator workspace(base);
    key_ranges = allocate_key_ranges(p, args.in, !args.schedule.empty(), workspace);
    allocate_sums(p, choice, params, workspace);
    bytes = workspace.used();
  }

 private:
  // A mask or a bias that differs between the query heads of a group is read like one with a query dimension.
  static void mark_elementwise(ScoreParams& score, const Problem& p) {
    if (p.heads_q == p.heads_kv) return;
    if (score.mask.head_q != 0) score.mask.dense = true;
    if (score.bias.head_q != 0) {
      score.bias.dense = true;
      score.final_log2_scale = log2e;
    }
  }
};

// The attention of a decode step over the slots; the kernel hides slots without a key.
Problem step_problem(const DecodeStepArgs& args) {
  Problem p = pending_problem(args.cache, args.heads_q, 1, args.scale, args.score_use);
  p.softcap = args.softcap;
  p.nonfinite = args.nonfinite;
  p.intervals_shape = {};
  return p;
}

// Everything about a decode step.
struct Step {
  Problem problem;
  Choice choice;
  StepParams params;
  std::size_t bytes;

  Step(const DecodeStepArgs& args, const DeviceProperties& device, void* base)
      : problem(step_problem(args)),
        choice(choose(problem, shared_class(device))),
        params(forward_params(args, problem)) {
    const KvCache& cache = args.cache;
    params.split = split_keys(problem, policy(choice), cache.shape.window, device);
    params.scores = cache.scores;
    params.positions = cache.positions;
    params.counts = cache.counts;
    params.seen = cache.seen;
    params.slots = cache.shape.slots();
    params.k_slots = rows_of(by_token(cache.k));
    params.v_slots = rows_of(by_token(cache.v));
    params.new_k = rows_of(args.k);
    params.new_v = rows_of(args.v);
    params.new_scores = args.scores;
    params.mask = args.mask;
    WorkspaceAllocator workspace(base);
    allocate_sums(problem, choice, params, workspace);
    if (!params.split.in_cluster) {
      const std::int64_t rows = problem.batch * problem.heads_kv;
      params.victims = workspace.take<Victim>(rows * params.split.splits);
      params.counts_after = workspace.take<std::int32_t>(rows);
    }
    bytes = workspace.used();
  }

 private:
  static Tensor4 by_token(const Tensor4& t) {  // [B, slots, Hkv, D]
    return {t.data, {t.stride[0], t.stride[2], t.stride[1], t.stride[3]}};
  }

  static ForwardParams forward_params(const DecodeStepArgs& args, const Problem& problem) {
    ForwardArgs forward;
    forward.problem = problem;
    forward.in = pending_inputs(args.cache, args.q, 1, nullptr, args.score_use);
    forward.out = args.out;
    forward.lse = args.lse;
    return cuda::params_of(forward);
  }
};

}  // namespace

std::string decline(const Problem& p) {
  constexpr std::int64_t most_queries = 64;
  if (p.seqlen_q > most_queries) {
    return "its kernels for few queries take up to " + std::to_string(most_queries);
  }
  if (p.batch * p.heads_q * p.seqlen_q > std::numeric_limits<std::int32_t>::max()) {
    return "its kernels for few queries count rows in 31 bits";
  }
  return sm80::decline(p);
}

std::size_t workspace_size(const ForwardArgs& args, const DeviceProperties& device) {
  return Call(args, device, nullptr).bytes;
}

void run(const ForwardArgs& args, const DeviceProperties& device, const Execution& execution) {
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  Call call(args, device, execution.workspace);
  call.params.key_ranges = find_key_ranges(args.problem, args.in, call.key_ranges, stream);
  dispatch(call.choice, [&]<class T, int D, SharedClass S>() {
    launch_split<T, D, S>(call.choice, call.params, stream);
  });
}

std::string name(const ForwardArgs& args, const DeviceProperties& device) {
  return name(choose(args.problem, shared_class(device)));
}

std::vector<std::string> names(const DeviceProperties& device) {
  std::vector<std::string> result;
  for (const Choice& choice : choices(shared_class(device))) result.push_back(name(choice));
  return result;
}

// ---- Decode steps -----------------------------------------------------------------------------------------

std::string decline_cache(const KvCacheShape& shape) {
  if (shape.dtype != DType::bf16 && shape.dtype != DType::f16) return "it computes in bf16 and f16";
  if (shape.head_dim % 8 != 0) return "it needs a head_dim that is a multiple of 8";
  if (shape.batch * shape.heads_kv * shape.slots() > std::numeric_limits<std::int32_t>::max()) {
    return "it counts slots in 31 bits";
  }
  return "";
}

std::size_t step_workspace_size(const DecodeStepArgs& args, const DeviceProperties& device) {
  return Step(args, device, nullptr).bytes;
}

void run_step(const DecodeStepArgs& args, const DeviceProperties& device,
              const Execution& execution) {
  const Step step(args, device, execution.workspace);
  if (step.params.split.row_tiles > 1) {
    throw InvalidArgument(
        "heads_q", std::to_string(args.heads_q),
        "at most " + std::to_string(policy(step.choice).rows()) + " for each kv head on this GPU");
  }
  dispatch(step.choice, [&]<class T, int D, SharedClass S>() {
    launch_step<T, D, S>(step.choice, step.params, static_cast<cudaStream_t>(execution.stream));
  });
}

std::string step_name(const DecodeStepArgs& args, const DeviceProperties& device) {
  return step_name(choose(step_problem(args), shared_class(device)));
}

std::vector<std::string> step_names(const DeviceProperties& device) {
  std::vector<std::string> result;
  for (const Choice& choice : step_choices(shared_class(device))) {
    result.push_back(step_name(choice));
  }
  return result;
}

}  // namespace flash_dmattn::cuda::sm80::few_queries
