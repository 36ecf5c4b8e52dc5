#include "cuda/sm80/few_queries/few_queries.h"

#include <limits>

#include "common/kv_cache/views.h"
#include "cuda/attention/problem.h"
#include "cuda/device_plan.h"
#include "cuda/primitives/math.cuh"
#include "cuda/schedule/schedule.h"
#include "cuda/sm80/dispatch.h"
#include "cuda/sm80/few_queries/launch.h"
#include "cuda/stages/stages.h"
#include "flash_dmattn/error.h"

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

// The plan of a call with few queries.
class SplitPlan {
 public:
  std::size_t bytes;

  SplitPlan(const ForwardArgs& args, const Execution&)
      : schedule_(args.problem, args.in.visibility, ListSchedule::Order::full_first),
        choice_(choose_kernel(args.problem, shared_class(current_device()))),
        params_(cuda::params_of(args)) {
    const Problem& p = args.problem;
    mark_elementwise(params_.score, p);
    const std::int64_t most_keys = schedule_.exists() ? schedule_.capacity() : p.seqlen_k;
    params_.split = split_keys(p, policy_of(choice_), most_keys, current_device());
    bytes = place(args, nullptr);
  }

  void run(const ForwardArgs& args, const Execution& execution) const {
    const auto stream = static_cast<cudaStream_t>(execution.stream);
    SplitPlan placed = *this;
    placed.place(args, execution.workspace);
    placed.schedule_.build(execution);
    placed.params_.key_ranges = find_key_ranges(args.problem, args.in, placed.key_ranges_, stream);
    dispatch(choice_, [&]<class T, int D, SharedClass S>() {
      launch_split<T, D, S>(choice_, placed.params_, stream);
    });
  }

  std::string kernel_name() const { return name(choice_); }

 private:
  // Sets the pointers into the workspace, and returns its size. With a null base it only counts.
  std::size_t place(const ForwardArgs& args, void* base) {
    WorkspaceAllocator workspace(base);
    schedule_.place(workspace);
    params_.tile_lists = schedule_.lists();
    key_ranges_ = allocate_key_ranges(args.problem, args.in, schedule_.exists(), workspace);
    allocate_sums(args.problem, choice_, params_, workspace);
    return workspace.bytes();
  }

  // A mask or a bias that differs between the query heads of a group is read like one with a query dimension.
  static void mark_elementwise(ScoreParams& score, const Problem& p) {
    if (p.heads_q == p.heads_kv) return;
    if (score.mask.head_q != 0) score.mask.dense = true;
    if (score.bias.head_q != 0) {
      score.bias.dense = true;
      score.final_log2_scale = log2e;
    }
  }

  ListSchedule schedule_;
  Choice choice_;
  Params params_;
  KeyRangeWorkspace key_ranges_;
};

// The plan of a decode step: attention over the slots, of which the kernel hides those without a key.
class StepPlan {
 public:
  std::size_t bytes;

  StepPlan(const DecodeStepArgs& args, const Execution&)
      : problem_(step_problem(args)),
        choice_(choose_kernel(problem_, shared_class(current_device()))),
        params_(forward_params(args, problem_)) {
    const KvCache& cache = args.cache;
    const Policy policy = policy_of(choice_);
    params_.split = split_keys(problem_, policy, problem_.seqlen_k, current_device());
    if (params_.split.row_tiles > 1) {
      throw InvalidArgument(
          "heads_q", std::to_string(args.heads_q),
          "at most " + std::to_string(policy.rows()) + " for each kv head on this GPU");
    }
    if (!cache.shape.has_equal_heads()) {
      params_.split = split_heads(cache.shape, policy, current_device(), params_.head_blocks);
    }
    params_.scores = cache.scores;
    params_.positions = cache.positions;
    params_.counts = cache.counts;
    params_.seen = cache.seen;
    params_.rows = RowIndex(cache.rows);
    params_.score.bias.batch = cache.rows.slot_stride;
    params_.rule = CacheRule(cache.shape);
    params_.k_slots = rows_of(by_token(cache.k));
    params_.v_slots = rows_of(by_token(cache.v));
    params_.new_k = rows_of(args.k);
    params_.new_v = rows_of(args.v);
    params_.new_scores = args.scores;
    params_.mask = args.mask;
    bytes = place(nullptr);
  }

  void run(const DecodeStepArgs&, const Execution& execution) const {
    StepPlan placed = *this;
    placed.place(execution.workspace);
    dispatch(choice_, [&]<class T, int D, SharedClass S>() {
      launch_step<T, D, S>(choice_, placed.params_, static_cast<cudaStream_t>(execution.stream));
    });
  }

  std::string kernel_name() const { return step_name(choice_); }

 private:
  // Lays out the workspace, as SplitPlan::place does.
  std::size_t place(void* base) {
    WorkspaceAllocator workspace(base);
    allocate_sums(problem_, choice_, params_, workspace);
    if (!params_.split.in_cluster) {
      const std::int64_t rows = problem_.batch * problem_.heads_kv;
      params_.scans = workspace.take<SlotScan>(rows * params_.split.splits);
      params_.counts_after = workspace.take<int2>(rows);
    }
    return workspace.used();
  }

  static ForwardParams forward_params(const DecodeStepArgs& args, const Problem& problem) {
    ForwardArgs forward;
    forward.problem = problem;
    forward.in = inputs_of_slots(args.cache, args.q, args.score_use);
    forward.out = args.out;
    forward.lse = args.lse;
    return cuda::params_of(forward);
  }

  Problem problem_;
  Choice choice_;
  StepParams params_;
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
  return decline_shape(p, min_tile_rows);
}

void plan_split(const ForwardArgs& args, const Execution& execution, Plan<ForwardArgs>& plan) {
  make_plan<OnDevice<SplitPlan>>(args, execution, plan);
}

std::vector<std::string> split_names(const DeviceProperties& device) {
  return names_of(split_choices(shared_class(device)));
}

// ---- Decode steps -----------------------------------------------------------------------------------------

std::string decline_cache(const KvCacheShape& shape) {
  if (shape.dtype != DType::bf16 && shape.dtype != DType::f16) return "it computes in bf16 and f16";
  if (shape.head_dim % 8 != 0) return "it needs a head_dim that is a multiple of 8";
  if (value_dim_of(shape) % 8 != 0) return "it needs a value_dim that is a multiple of 8";
  if (shape.batch * shape.total_slots() > std::numeric_limits<std::int32_t>::max()) {
    return "it counts slots in 31 bits";
  }
  if (!shape.has_equal_heads() && shape.heads_kv > most_unequal_heads) {
    return "it has windows for up to " + std::to_string(most_unequal_heads) + " heads";
  }
  return "";
}

void plan_step(const DecodeStepArgs& args, const Execution& execution, Plan<DecodeStepArgs>& plan) {
  make_plan<OnDevice<StepPlan>>(args, execution, plan);
}

std::vector<std::string> step_names(const DeviceProperties& device) {
  std::vector<std::string> result;
  for (const Choice& choice : step_choices(shared_class(device))) {
    result.push_back(step_name(choice));
  }
  return result;
}

}  // namespace flash_dmattn::cuda::sm80::few_queries
