#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/selection/device.cuh"

// A choice among the keys that a dense mask or bias shows, as ranks of keys and limits of queries.
//
// A query's best visible keys are the first visible ones on a walk over all keys, best first; its limit is
// the rank at which it has enough. The keys of a row come in the same order for all queries, so a warp walks
// for 32 queries at once: mask and bias are packed to a word for each key, whose bits are the queries, a lane
// gathers the word of one key, and 32 x 32 bits transposed give every query the keys of a step.
namespace flash_dmattn::cuda::ranks {

inline constexpr int tile_queries = warp_size;

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
  __device__ std::uint32_t* of_tile(std::int64_t matrix, int tile) const {
    return words + (matrix * tiles() + tile) * seqlen_k;
  }
};

// A mask (T: bytes) or a bias, [heads of the words or a divisor, Sq, Sk] for each batch element. Strides in
// elements, 0 where it broadcasts.
template <class T>
struct Pairs {
  const T* data = nullptr;
  std::int64_t stride[4] = {};
  int heads = 1;
  float mask_value = 0;   // of a bias
  bool in_words = false;  // the elements of every thread of pack_queries are an aligned word
  bool first =
      true;  // to be packed; else the bits of the words stay only where this one shows the element, too

  static constexpr int in_word = 4 / sizeof(T);

  __device__ bool shows(T element) const {
    if constexpr (sizeof(T) == 1) {
      return element != 0;
    } else {
      return static_cast<float>(element) > mask_value;
    }
  }
};

inline constexpr int pack_threads = 128;

// A thread has a word of every row: four keys of a mask, two or one of a bias; 32 loads in flight.
template <class T>
__global__ void __launch_bounds__(pack_threads) pack_queries(QueryWords p, Pairs<T> pairs) {
  wait_for_previous_kernel();
  constexpr int thread_keys = Pairs<T>::in_word;
  const int blocks = ceil_div(p.seqlen_k, pack_threads * thread_keys);
  const int part = static_cast<int>(blockIdx.x) % blocks;
  const int tile = static_cast<int>(blockIdx.x) / blocks % p.tiles();
  const std::int64_t matrix = blockIdx.x / (static_cast<unsigned>(blocks) * p.tiles());
  const int key = (part * pack_threads + static_cast<int>(threadIdx.x)) * thread_keys;
  if (key >= p.seqlen_k) return;
  const int row = tile * tile_queries;
  const int rows = min(p.seqlen_q - row, tile_queries);
  const int keys = min(p.seqlen_k - key, thread_keys);
  const T* const from = pairs.data + matrix / p.heads * pairs.stride[0] +
                        matrix % p.heads * pairs.heads / p.heads * pairs.stride[1] +
                        row * pairs.stride[2] + key * pairs.stride[3];
  std::uint32_t word[thread_keys] = {};
  const bool seen = !p.causal || key <= row + rows - 1 + p.shift;
  if (seen) {
#pragma unroll
    for (int i = 0; i < tile_queries; ++i) {
      if (i >= rows) continue;
      const T* const of_row = from + i * pairs.stride[2];
      if (pairs.in_words) {
        const std::uint32_t elements = __ldg(reinterpret_cast<const std::uint32_t*>(of_row));
#pragma unroll
        for (int e = 0; e < thread_keys; ++e) {
          word[e] |= (pairs.shows(reinterpret_cast<const T*>(&elements)[e]) ? 1u : 0u) << i;
        }
      } else {
        for (int e = 0; e < keys; ++e) {
          word[e] |= (pairs.shows(of_row[e * pairs.stride[3]]) ? 1u : 0u) << i;
        }
      }
    }
  }
  std::uint32_t* const to = p.of_tile(matrix, tile) + key;
#pragma unroll
  for (int e = 0; e < thread_keys; ++e) {
    if (e >= keys) break;
    const int first = p.causal ? max(key + e - p.shift - row, 0) : 0;  // query that sees the key
    const std::uint32_t shown = first < tile_queries ? word[e] & (full_mask << first) : 0;
    to[e] = pairs.first ? shown : shown & to[e];
  }
}

// A warp walks for each tile of queries of each [batch, heads].
struct Walk {
  QueryWords words;
  const std::int32_t* order =
      nullptr;                    // [rows of scores, Sk] keys; -1: never chosen, as those after it
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

inline constexpr int walk_warps = 8;
inline constexpr int walk_steps = 4;  // whose loads are in flight together

__global__ void __launch_bounds__(walk_warps* warp_size) find_limits(Walk p) {
  wait_for_previous_kernel();
  const std::int64_t mine = std::int64_t{blockIdx.x} * walk_warps + warp_id();
  if (mine >= p.warps()) return;
  const int lane = lane_id();
  // Neighbours have different heads of one tile: most masks are the same for all of them.
  const int head = static_cast<int>(mine % p.heads);
  const int tile = static_cast<int>(mine / p.heads % p.words.tiles());
  const auto batch = static_cast<int>(mine / p.heads / p.words.tiles());
  const auto matrix_of = [&](int batches, int heads) {
    const std::int64_t of_batch = batches == 1 ? 0 : batch;
    return of_batch * heads + std::int64_t{head} * heads / p.heads;
  };
  const int keys = p.words.seqlen_k;
  const std::uint32_t* const words = p.words.of_tile(matrix_of(p.words.batch, p.words.heads), tile);
  const std::int32_t* const order = p.order + matrix_of(p.order_batch, p.order_heads) * keys;

  int missing = p.window;  // keys that query `lane` still lacks
  int limit = p.window == 0 ? 0 : keys;
  for (int rank = 0; rank < keys && __any_sync(full_mask, missing > 0);
       rank += walk_steps * warp_size) {
    std::uint32_t met[walk_steps];
#pragma unroll
    for (int i = 0; i < walk_steps; ++i) {
      const int at = rank + i * warp_size + lane;
      const int key = at < keys ? order[at] : -1;
      met[i] = key >= 0 ? words[key] : 0;
    }
#pragma unroll
    for (int i = 0; i < walk_steps; ++i) {
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

}  // namespace flash_dmattn::cuda::ranks
