#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/arguments.h"
#include "common/selection_rule.h"
#include "cuda/selection/device.cuh"
#include "cuda/selection/selection.h"

// Expresses a selection among the keys that a dense mask or bias shows by ranks of keys and limits of queries.
//
// A query's best visible keys are the first visible keys in the order of all keys, best first. Its limit is the rank at
// which it has enough keys. The order is the same for all queries of a row, so a warp visits the keys for 32 queries at
// once: mask and bias are packed to a word for each key, whose bits are the queries. A lane gathers the word of one
// key, and transposing 32 x 32 bits gives every query the keys of a step.
namespace flash_dmattn::cuda {
namespace {

// ---- Kernels ------------------------------------------------------------------------------------

constexpr int tile_queries = warp_size;

// The visible queries of each key, [batch, heads, tiles, Sk] words.
struct QueryWords {
  std::uint32_t* words = nullptr;
  int batch = 1;
  int heads = 1;
  int seqlen_q = 0;
  int seqlen_k = 0;
  int shift = 0;  // query r is at key r + shift
  bool causal = false;

  __host__ __device__ int tiles() const { return ceil_div(seqlen_q, tile_queries); }
  __device__ std::uint32_t* tile_words(std::int64_t matrix, int tile) const {
    return words + (matrix * tiles() + tile) * seqlen_k;
  }
};

// A mask (T is a byte) or a bias, [heads of the words or a divisor, Sq, Sk] for each batch element. Strides are in
// elements, 0 for a broadcast dimension.
template <class T>
struct MaskOrBias {
  const T* data = nullptr;
  std::int64_t stride[4] = {};
  int heads = 1;
  float mask_value = 0;        // biases at or below it mask
  bool aligned_words = false;  // the elements of every thread of pack_queries are an aligned word
  bool first =
      true;  // packs the words; otherwise bits remain set only where this mask or bias shows the element, too

  static constexpr int in_word = 4 / sizeof(T);

  __device__ bool shows(T element) const {
    if constexpr (sizeof(T) == 1) {
      return element != 0;
    } else {
      return static_cast<float>(element) > mask_value;
    }
  }
};

constexpr int pack_threads = 128;

// A thread has a word of every row: four keys of a mask, two or one of a bias. It has 32 loads in flight.
template <class T>
__global__ void __launch_bounds__(pack_threads) pack_queries(QueryWords p, MaskOrBias<T> dense) {
  wait_for_previous_kernel();
  constexpr int thread_keys = MaskOrBias<T>::in_word;
  const int blocks = ceil_div(p.seqlen_k, pack_threads * thread_keys);
  const int part = static_cast<int>(blockIdx.x) % blocks;
  const int tile = static_cast<int>(blockIdx.x) / blocks % p.tiles();
  const std::int64_t matrix = blockIdx.x / (static_cast<unsigned>(blocks) * p.tiles());
  const int key = (part * pack_threads + static_cast<int>(threadIdx.x)) * thread_keys;
  if (key >= p.seqlen_k) return;
  const int row = tile * tile_queries;
  const int rows = min(p.seqlen_q - row, tile_queries);
  const int keys = min(p.seqlen_k - key, thread_keys);
  const T* const from = dense.data + matrix / p.heads * dense.stride[0] +
                        matrix % p.heads * dense.heads / p.heads * dense.stride[1] +
                        row * dense.stride[2] + key * dense.stride[3];
  std::uint32_t word[thread_keys] = {};
  const bool seen = !p.causal || key <= row + rows - 1 + p.shift;
  if (seen) {
#pragma unroll
    for (int i = 0; i < tile_queries; ++i) {
      if (i >= rows) continue;
      const T* const query_row = from + i * dense.stride[2];
      if (dense.aligned_words) {
        const std::uint32_t elements = __ldg(reinterpret_cast<const std::uint32_t*>(query_row));
#pragma unroll
        for (int e = 0; e < thread_keys; ++e) {
          word[e] |= (dense.shows(reinterpret_cast<const T*>(&elements)[e]) ? 1u : 0u) << i;
        }
      } else {
        for (int e = 0; e < keys; ++e) {
          word[e] |= (dense.shows(query_row[e * dense.stride[3]]) ? 1u : 0u) << i;
        }
      }
    }
  }
  std::uint32_t* const to = p.tile_words(matrix, tile) + key;
#pragma unroll
  for (int e = 0; e < thread_keys; ++e) {
    if (e >= keys) break;
    const int first =
        p.causal ? max(key + e - p.shift - row, 0) : 0;  // first query that sees the key
    const std::uint32_t shown = first < tile_queries ? word[e] & (full_mask << first) : 0;
    to[e] = dense.first ? shown : shown & to[e];
  }
}

// Finds the limits of queries, with a warp for each tile of queries of each [batch, heads].
struct LimitSearch {
  QueryWords words;
  const std::int32_t* order =
      nullptr;  // [rows of scores, Sk] keys; -1 from the first key that is never chosen
  std::int32_t* limit = nullptr;  // [batch, heads, Sq]
  int batch = 0;
  int heads = 0;
  int order_batch = 1;
  int order_heads = 1;
  int window = 0;

  __host__ __device__ std::int64_t warps() const {
    return std::int64_t{batch} * words.tiles() * heads;
  }
};

constexpr int limit_warps = 8;
constexpr int limit_steps = 4;  // steps with loads in flight together

__global__ void __launch_bounds__(limit_warps* warp_size) find_limits(LimitSearch p) {
  wait_for_previous_kernel();
  const std::int64_t mine = std::int64_t{blockIdx.x} * limit_warps + warp_id();
  if (mine >= p.warps()) return;
  const int lane = lane_id();
  // Neighbouring warps have different heads of one tile, because most masks are the same for all heads.
  const int head = static_cast<int>(mine % p.heads);
  const int tile = static_cast<int>(mine / p.heads % p.words.tiles());
  const auto batch = static_cast<int>(mine / p.heads / p.words.tiles());
  const auto matrix_of = [&](int batches, int heads) {
    const std::int64_t batch_index = batches == 1 ? 0 : batch;
    return batch_index * heads + std::int64_t{head} * heads / p.heads;
  };
  const int keys = p.words.seqlen_k;
  const std::uint32_t* const words =
      p.words.tile_words(matrix_of(p.words.batch, p.words.heads), tile);
  const std::int32_t* const order = p.order + matrix_of(p.order_batch, p.order_heads) * keys;

  int missing = p.window;  // number of keys that query `lane` still lacks
  int limit = p.window == 0 ? 0 : keys;
  for (int rank = 0; rank < keys && warp_any(missing > 0); rank += limit_steps * warp_size) {
    std::uint32_t met[limit_steps];
#pragma unroll
    for (int i = 0; i < limit_steps; ++i) {
      const int at = rank + i * warp_size + lane;
      const int key = at < keys ? order[at] : -1;
      met[i] = key >= 0 ? words[key] : 0;
    }
#pragma unroll
    for (int i = 0; i < limit_steps; ++i) {
      const std::uint32_t seen = transpose_bits(met[i], lane);
      const int count = __popc(seen);
      if (missing > 0 && missing <= count) {
        limit = rank + i * warp_size + select_bit(seen, missing - 1) + 1;
      }
      missing -= count;
    }
  }
  const int row = tile * tile_queries + lane;
  if (row < p.words.seqlen_q) {
    p.limit[(std::int64_t{batch} * p.heads + head) * p.words.seqlen_q + row] = limit;
  }
}

// ---- Arguments and launches ---------------------------------------------------------------------

SelectionArgs scores_of(const RankArgs& args) {
  SelectionArgs scores;
  scores.device = args.device;
  scores.batch = args.scores_shape[0];
  scores.heads = args.scores_shape[1];
  scores.seqlen_q = args.seqlen_q;
  scores.seqlen_k = args.seqlen_k;
  scores.rule.window = args.window;
  scores.scores = args.scores;
  scores.scores_dtype = args.scores_dtype;
  scores.scores_stride = args.scores_stride;
  return scores;
}

using Matrices = std::array<std::int64_t, 2>;  // batch and heads of a mask or a bias

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
  require_length("seqlen_q", args.seqlen_q);
  require_length("seqlen_k", args.seqlen_k);
  const SelectionArgs scores = scores_of(args);
  require_selection(scores);
  require_sortable(scores);
}

struct Work {
  std::int32_t* order;  // [scores_shape, Sk]
  QueryWords words;
  char* sort;  // workspace
  std::size_t sort_bytes;
  std::size_t bytes;

  Work(const RankArgs& args, void* base) {
    WorkspaceAllocator workspace(base);
    order =
        workspace.take<std::int32_t>(args.scores_shape[0] * args.scores_shape[1] * args.seqlen_k);
    // The number of matrices that mask and bias together distinguish.
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

// Packs the elements that a mask or a bias shows, if there is one.
template <class T>
void pack(const QueryWords& words, const void* data, const Matrices& shape,
          const std::array<std::int64_t, 4>& stride, MaskOrBias<T> dense, cudaStream_t stream) {
  if (!is_given(shape)) return;
  dense.data = static_cast<const T*>(data);
  std::copy(stride.begin(), stride.end(), dense.stride);
  if (shape[0] == 1) dense.stride[0] = 0;
  dense.heads = static_cast<int>(shape[1]);
  constexpr std::int64_t in_word = MaskOrBias<T>::in_word;
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(data));
  dense.aligned_words = stride[3] == 1 && words.seqlen_k % in_word == 0 && address % 4 == 0 &&
                        (stride[0] | stride[1] | stride[2]) % in_word == 0;
  const int parts = ceil_div(words.seqlen_k, pack_threads * static_cast<int>(in_word));
  const std::int64_t matrices = std::int64_t{words.batch} * words.heads;
  launch_grid<pack_queries<T>>({matrices * words.tiles() * parts, pack_threads}, stream, words,
                               dense);
}

void pack_dense(const RankArgs& args, const QueryWords& words, cudaStream_t stream) {
  pack<std::uint8_t>(words, args.mask, args.mask_shape, args.mask_stride, {}, stream);
  const auto pack_bias = [&]<class T>() {
    pack<T>(words, args.bias, args.bias_shape, args.bias_stride,
            {.mask_value = static_cast<float>(mask_value(args.bias_dtype)),
             .first = !is_given(args.mask_shape)},
            stream);
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
  const bool any_element = limits * args.seqlen_k > 0;
  require_pointer("mask", args.mask, any_element && is_given(args.mask_shape));
  require_pointer("bias", args.bias, any_element && is_given(args.bias_shape));
  const auto stream = static_cast<cudaStream_t>(execution.stream);

  const Work work(args, execution.workspace);
  Execution sorting = execution;
  sorting.workspace = work.sort;
  sorting.workspace_bytes = work.sort_bytes;
  order_keys(scores_of(args), work.order, args.key_rank, sorting);
  if (any_element) pack_dense(args, work.words, stream);
  const LimitSearch search{.words = work.words,
                           .order = work.order,
                           .limit = args.rank_limit,
                           .batch = static_cast<int>(args.batch),
                           .heads = static_cast<int>(args.heads),
                           .order_batch = static_cast<int>(args.scores_shape[0]),
                           .order_heads = static_cast<int>(args.scores_shape[1]),
                           .window = static_cast<int>(std::min(args.window, args.seqlen_k))};
  launch_grid<find_limits>(
      {ceil_div(search.warps(), std::int64_t{limit_warps}), limit_warps * warp_size}, stream,
      search);
}

}  // namespace flash_dmattn::cuda
