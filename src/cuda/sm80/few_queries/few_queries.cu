#include "cuda/sm80/few_queries/few_queries.h"

#include <algorithm>
#include <limits>

#include "cuda/common/math.cuh"
#include "cuda/problem.h"
#include "cuda/sm80/dispatch.h"
#include "cuda/sm80/few_queries/launch.h"
#include "cuda/stages.h"
#include "selection/schedule_contents.h"

namespace flash_dmattn::cuda::sm80::few_queries {
namespace {

// Everything about a call, with its workspace at `base`, which may be null.
struct Call {
  Choice choice;
  Params params;
  KeyRangeWorkspace key_ranges;
  std::size_t bytes;

  Call(const ForwardArgs& args, const DeviceProperties& device, void* base)
      : choice(choose(args.problem, shared_class(device))), params(params_of(args)) {
    const Problem& p = args.problem;
    mark_elementwise(params.score, p);
    const std::int64_t most_keys =
        args.schedule.empty() ? p.seqlen_k
                              : std::min(p.seqlen_k, ScheduleContents::of(args.schedule).capacity);
    params.split = split_keys(p, policy(choice), most_keys, device.multiprocessors);
    WorkspaceAllocator workspace(base);
    key_ranges = allocate_key_ranges(p, args.in, !args.schedule.empty(), workspace);
    const std::int64_t parts = p.batch * p.heads_q * p.seqlen_q * params.split.splits;
    params.sums = workspace.take<RowSums>(parts);
    params.outs = workspace.take<float>(parts * choice.head_dim);
    bytes = workspace.used();
  }

 private:
  // A mask or a bias that differs between the query heads of a group is read as one with a query dimension.
  static void mark_elementwise(ScoreParams& score, const Problem& p) {
    if (p.heads_q == p.heads_kv) return;
    if (score.mask.head_q != 0) score.mask.dense = true;
    if (score.bias.head_q != 0) {
      score.bias.dense = true;
      score.final_log2_scale = log2e;
    }
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

}  // namespace flash_dmattn::cuda::sm80::few_queries
