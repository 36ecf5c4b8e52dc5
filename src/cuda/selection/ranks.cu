#include "cuda/selection/ranks.cuh"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
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

using Matrices = std::array<std::int64_t, 2>;  // of a mask or a bias: batch and heads

bool is_given(const Matrices& shape) { return shape != Matrices{}; }

void validate(const RankArgs& args) {
  require_length("batch", args.batch);
  require_length("heads", args.heads);
  require_length("batch * heads", args.batch * args.heads);
  const auto check_shape = [&](const char* name, const Matrices& shape) {
    const bool fits = (shape[0] == args.batch || shape[0] == 1) &&
                      (shape[1] > 0 ? args.heads % shape[1] == 0 : args.heads == 0);
    if (fits) return;
    throw InvalidArgument(name,
                          "(" + std::to_string(shape[0]) + ", " + std::to_string(shape[1]) + ")",
                          "({" + std::to_string(args.batch) + "|1}, a divisor of " +
                              std::to_string(args.heads) + ")");
  };
  check_shape("scores_shape", args.scores_shape);
  const bool biased = is_given(args.bias_shape);
  if (is_given(args.mask_shape) || !biased) check_shape("mask_shape", args.mask_shape);
  if (biased) check_shape("bias_shape", args.bias_shape);
  if (biased && args.bias_dtype > DType::f16) {
    throw InvalidArgument("bias_dtype", std::string(name_of(args.bias_dtype)), "f32, bf16 or f16");
  }
  if (biased && std::isnan(args.mask_value)) {
    throw InvalidArgument("mask_value", "nan", "a number, with a bias");
  }
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
    // As many matrices as mask and bias together distinguish.
    const std::int64_t batch = std::max(args.mask_shape[0], args.bias_shape[0]);
    const std::int64_t heads = std::lcm(std::max(args.mask_shape[1], std::int64_t{1}),
                                        std::max(args.bias_shape[1], std::int64_t{1}));
    words.batch = static_cast<int>(batch);
    words.heads = static_cast<int>(heads);
    words.seqlen_q = static_cast<int>(args.seqlen_q);
    words.seqlen_k = static_cast<int>(args.seqlen_k);
    words.shift = static_cast<int>(args.seqlen_k - args.seqlen_q);
    words.causal = args.causal;
    words.words =
        workspace.take<std::uint32_t>(batch * heads * words.tiles() * std::int64_t{args.seqlen_k});
    sort_bytes = order_workspace_size(scores_of(args));
    sort = workspace.take<char>(static_cast<std::int64_t>(sort_bytes));
    bytes = workspace.used();
  }
};

// Packs the elements that a mask or a bias shows, where there is one.
template <class T>
void pack(const ranks::QueryWords& words, const void* data, const Matrices& shape,
          const std::array<std::int64_t, 4>& stride, ranks::Pairs<T> pairs, cudaStream_t stream) {
  if (!is_given(shape)) return;
  pairs.data = static_cast<const T*>(data);
  std::copy(stride.begin(), stride.end(), pairs.stride);
  if (shape[0] == 1) pairs.stride[0] = 0;
  pairs.heads = static_cast<int>(shape[1]);
  constexpr std::int64_t in_word = ranks::Pairs<T>::in_word;
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(data));
  pairs.in_words = stride[3] == 1 && words.seqlen_k % in_word == 0 && address % 4 == 0 &&
                   (stride[0] | stride[1] | stride[2]) % in_word == 0;
  const int parts = ceil_div(words.seqlen_k, ranks::pack_threads * static_cast<int>(in_word));
  const std::int64_t matrices = std::int64_t{words.batch} * words.heads;
  launch_grid(ranks::pack_queries<T>, {matrices * words.tiles() * parts, ranks::pack_threads},
              stream, words, pairs);
}

void pack_pairs(const RankArgs& args, const ranks::QueryWords& words, cudaStream_t stream) {
  pack<std::uint8_t>(words, args.mask, args.mask_shape, args.mask_stride, {}, stream);
  const auto pack_bias = [&]<class T>() {
    pack<T>(words, args.bias, args.bias_shape, args.bias_stride,
            {.mask_value = args.mask_value, .first = !is_given(args.mask_shape)}, stream);
  };
  switch (args.bias_dtype) {
    case DType::bf16: return pack_bias.template operator()<__nv_bfloat16>();
    case DType::f16: return pack_bias.template operator()<__half>();
    default: return pack_bias.template operator()<float>();
  }
}

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
  const bool any_pair = limits * args.seqlen_k > 0;
  require_pointer("mask", args.mask, any_pair && is_given(args.mask_shape));
  require_pointer("bias", args.bias, any_pair && is_given(args.bias_shape));
  const auto stream = static_cast<cudaStream_t>(execution.stream);

  const Work work(args, execution.workspace);
  Execution sorting = execution;
  sorting.workspace = work.sort;
  sorting.workspace_bytes = work.sort_bytes;
  order_keys(scores_of(args), work.order, args.key_rank, sorting);
  if (any_pair) pack_pairs(args, work.words, stream);
  const ranks::Walk walk{.words = work.words,
                         .order = work.order,
                         .limit = args.rank_limit,
                         .batch = static_cast<int>(args.batch),
                         .heads = static_cast<int>(args.heads),
                         .order_batch = static_cast<int>(args.scores_shape[0]),
                         .order_heads = static_cast<int>(args.scores_shape[1]),
                         .window = static_cast<int>(std::min(args.window, args.seqlen_k))};
  launch_grid(
      ranks::find_limits,
      {ceil_div(walk.warps(), std::int64_t{ranks::walk_warps}), ranks::walk_warps * warp_size},
      stream, walk);
}

}  // namespace flash_dmattn::cuda
