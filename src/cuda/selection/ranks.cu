#include "cuda/selection/ranks.cuh"

#include <algorithm>
#include <cstdint>
#include <string>

#include "arguments.h"
#include "cuda/selection/selection.h"

namespace flash_dmattn::cuda {
namespace {

SelectionArgs scores_of(const RankArgs& args) {
  SelectionArgs scores;
  scores.device = args.device;
  scores.batch = args.scores_shape[0];
  scores.heads = args.scores_shape[1];
  scores.seqlen_q = args.seqlen_q;
  scores.seqlen_k = args.seqlen_k;
  scores.window = args.window;
  scores.scores = args.scores;
  scores.scores_dtype = args.scores_dtype;
  scores.scores_stride = args.scores_stride;
  return scores;
}

void validate(const RankArgs& args) {
  require_length("batch", args.batch);
  require_length("heads", args.heads);
  require_length("batch * heads", args.batch * args.heads);
  const auto check_shape = [&](const char* name, const std::array<std::int64_t, 2>& shape) {
    const bool fits = (shape[0] == args.batch || shape[0] == 1) &&
                      (shape[1] > 0 ? args.heads % shape[1] == 0 : args.heads == 0);
    if (fits) return;
    throw InvalidArgument(name,
                          "(" + std::to_string(shape[0]) + ", " + std::to_string(shape[1]) + ")",
                          "({" + std::to_string(args.batch) + "|1}, a divisor of " +
                              std::to_string(args.heads) + ")");
  };
  check_shape("scores_shape", args.scores_shape);
  check_shape("mask_shape", args.mask_shape);
  cuda::validate(scores_of(args));
}

struct Work {
  std::int32_t* order;  // [scores_shape, Sk]
  ranks::QueryWords words;
  char* sort;  // workspace
  std::size_t sort_bytes;
  std::size_t bytes;

  Work(const RankArgs& args, void* base) {
    Carver workspace(base);
    order =
        workspace.take<std::int32_t>(args.scores_shape[0] * args.scores_shape[1] * args.seqlen_k);
    words.mask = args.mask;
    std::copy(args.mask_stride.begin(), args.mask_stride.end(), words.stride);
    words.mask_heads = static_cast<int>(args.mask_shape[1]);
    words.seqlen_q = static_cast<int>(args.seqlen_q);
    words.seqlen_k = static_cast<int>(args.seqlen_k);
    words.shift = static_cast<int>(args.seqlen_k - args.seqlen_q);
    words.causal = args.causal;
    const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(args.mask));
    const auto& stride = args.mask_stride;
    words.in_fours = stride[3] == 1 && args.seqlen_k % 4 == 0 &&
                     (address | stride[0] | stride[1] | stride[2]) % 4 == 0;
    words.words = workspace.take<std::uint32_t>(args.mask_shape[0] * args.mask_shape[1] *
                                                words.tiles() * args.seqlen_k);
    sort_bytes = order_workspace_size(scores_of(args));
    sort = workspace.take<char>(static_cast<std::int64_t>(sort_bytes));
    bytes = workspace.used();
  }
};

}  // namespace

std::size_t rank_workspace_size(const RankArgs& args) {
  validate(args);
  return Work(args, nullptr).bytes;
}

void rank_keys(const RankArgs& args, const Execution& execution) {
  const std::size_t bytes = cuda::rank_workspace_size(args);
  const std::int64_t score_rows = args.scores_shape[0] * args.scores_shape[1];
  const std::int64_t limits = args.batch * args.heads * args.seqlen_q;
  require_workspace(execution, bytes);
  require_pointer("scores", args.scores, score_rows * args.seqlen_k > 0);
  require_pointer("key_rank", args.key_rank, score_rows * args.seqlen_k > 0);
  require_pointer("rank_limit", args.rank_limit, limits > 0);
  require_pointer("mask", args.mask, limits * args.seqlen_k > 0);
  const auto stream = static_cast<cudaStream_t>(execution.stream);

  const Work work(args, execution.workspace);
  Execution sorting = execution;
  sorting.workspace = work.sort;
  sorting.workspace_bytes = work.sort_bytes;
  order_keys(scores_of(args), work.order, args.key_rank, sorting);
  if (args.seqlen_k > 0) {
    const std::int64_t matrices = args.mask_shape[0] * args.mask_shape[1];
    const int parts = ceil_div(work.words.seqlen_k, ranks::pack_threads * ranks::thread_keys);
    launch_grid(ranks::pack_queries, {matrices * work.words.tiles() * parts, ranks::pack_threads},
                stream, work.words);
  }
  const ranks::Walk walk{.words = work.words,
                         .order = work.order,
                         .limit = args.rank_limit,
                         .batch = static_cast<int>(args.batch),
                         .heads = static_cast<int>(args.heads),
                         .mask_batch = static_cast<int>(args.mask_shape[0]),
                         .order_batch = static_cast<int>(args.scores_shape[0]),
                         .order_heads = static_cast<int>(args.scores_shape[1]),
                         .window = static_cast<int>(std::min(args.window, args.seqlen_k))};
  launch_grid(
      ranks::find_limits,
      {ceil_div(walk.warps(), std::int64_t{ranks::walk_warps}), ranks::walk_warps * warp_size},
      stream, walk);
}

}  // namespace flash_dmattn::cuda
