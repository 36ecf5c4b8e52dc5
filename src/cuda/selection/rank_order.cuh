#pragma once

#include <cstdint>

#include "cuda/selection/scored_keys.cuh"

// The order of the keys of a row, best first, and its inverse: the input of the walk over ranks
// (rank_walk.cuh).
namespace flash_dmattn::cuda::per_query {

inline constexpr int warps = 16;
inline constexpr int threads = warps * warp_size;
inline constexpr int warp_ranks = 2 * warp_size;        // that a warp of the walk has
inline constexpr int chunk_ranks = warps * warp_ranks;  // C
inline constexpr int block_positions = 4096;  // positions gathered at a time, and counted together
inline constexpr int max_blocks = 2048;       // of a row: shared memory holds a count for each
inline constexpr std::int64_t max_keys = std::int64_t{max_blocks} * block_positions;

// Chunks that one CTA places. Grouped, they leave the walk fewer counts to sum.
inline constexpr int max_group_chunks = 16;
static_assert(max_group_chunks * chunk_ranks < 0xffff && block_positions < 0xffff &&
                  chunk_ranks < 0xffff,
              "counts and times are 16 bits wide");

// A sorted key: score code above, position below, so that the better key is the smaller number. The
// position is stored as distance from the end: of equal scores the more recent comes first.
struct KeyLayout {
  int position_bits = 0;
  int score_bits = 0;
  int seqlen_k = 0;

  __device__ std::uint64_t pack(int row, std::uint32_t code, int position) const {
    const std::uint64_t worse = ~code & (~std::uint32_t{0} >> (32 - score_bits));
    return ((static_cast<std::uint64_t>(row) << score_bits | worse) << position_bits) |
           static_cast<std::uint64_t>(seqlen_k - 1 - position);
  }
  __device__ int position(std::uint64_t key) const {
    return seqlen_k - 1 - static_cast<int>(key & ((std::uint64_t{1} << position_bits) - 1));
  }
  __device__ bool valid(std::uint64_t key) const {
    const std::uint32_t all = ~std::uint32_t{0} >> (32 - score_bits);
    return (static_cast<std::uint32_t>(key >> position_bits) & all) != all;  // never has code 0
  }
};

// One batch of rows and the arrays of its stages.
struct Rows {
  int first_row = 0;  // of the batch
  int rows = 0;
  int seqlen_k = 0;
  int window = 0;  // 0 < w < Sk
  KeyLayout layout;
  QueryRange queries;
  KeyInterval* intervals = nullptr;  // [rows of all batches, Sk]

  // Chunk 0 holds the w % C first ranks, so that rank w begins a chunk; all others hold C.
  int chunks = 0;
  int group_chunks = 1;  // chunks whose positions one CTA counts
  int groups = 0;
  int blocks = 0;                         // of positions
  const std::uint64_t* sorted = nullptr;  // [rows, Sk]
  std::int32_t* rank_of = nullptr;        // [rows, Sk rounded up to 4] by position
  // Positions of a block that the following ranks hold:
  std::uint16_t* before = nullptr;  // [rows, blocks, chunks] the chunks before in the group
  std::uint16_t* totals = nullptr;  // [rows, blocks, groups] the group

  __host__ __device__ int chunk_begin(int chunk) const {
    return chunk == 0 ? 0 : window % chunk_ranks + (chunk - 1) * chunk_ranks;
  }
  __device__ int chunk_end(int chunk) const { return min(chunk_begin(chunk + 1), seqlen_k); }
  __device__ int chunk_of(int rank) const {
    const int first = window % chunk_ranks;
    return rank < first ? 0 : (rank - first) / chunk_ranks + 1;
  }
  // The first chunk that needs a walk.
  __host__ __device__ int first_walked() const { return window / chunk_ranks + 1; }
  __device__ const std::uint64_t* sorted_row(int row) const {
    return sorted + static_cast<std::int64_t>(row) * seqlen_k;
  }
  __device__ std::int32_t* rank_row(int row) const {
    return rank_of + static_cast<std::int64_t>(row) * (ceil_div(seqlen_k, 4) * 4);
  }
  __device__ std::int64_t block_of_row(int row, int block) const {
    return static_cast<std::int64_t>(row) * blocks + block;
  }
  __device__ KeyInterval* intervals_row(int row) const {
    return intervals + static_cast<std::int64_t>(first_row + row) * seqlen_k;
  }
};

// Keys of a row as the sorts read them, in the order of falling positions: those at places first, first +
// step, ... Positions are negative past the end.
template <int Count>
struct KeysDescending {
  int position[Count];
  std::uint32_t code[Count];

  __device__ KeysDescending(const ScoredKeys& keys, const Rows& rows, int row, int first,
                            int step) {
#pragma unroll
    for (int i = 0; i < Count; ++i) position[i] = rows.seqlen_k - 1 - (first + i * step);
    keys.codes(rows.first_row + row, position, code);
  }
};

inline constexpr int pack_threads = 256;
inline constexpr int pack_keys = 4;  // of a thread

// The sort keys of a batch in the order of falling positions.
__global__ void __launch_bounds__(pack_threads)
    pack_keys_of_rows(ScoredKeys keys, Rows rows, std::uint64_t* packed) {
  wait_for_previous_kernel();
  const int blocks_per_row = ceil_div(rows.seqlen_k, pack_threads * pack_keys);
  const int row = static_cast<int>(blockIdx.x) / blocks_per_row;
  const int begin = static_cast<int>(blockIdx.x) % blocks_per_row * pack_threads * pack_keys;
  const KeysDescending<pack_keys> own(keys, rows, row, begin + static_cast<int>(threadIdx.x),
                                      pack_threads);
#pragma unroll
  for (int i = 0; i < pack_keys; ++i) {
    const int position = own.position[i];
    if (position < 0) return;
    packed[static_cast<std::int64_t>(row) * rows.seqlen_k + rows.seqlen_k - 1 - position] =
        rows.layout.pack(row, own.code[i], position);
  }
}

// A key's rank by its position, and its interval where that needs no walk: of the w best keys and of the
// keys never chosen.
__device__ inline void place_rank(const Rows& rows, int row, int rank, int position, bool valid) {
  rows.rank_row(row)[position] = valid ? rank : rows.seqlen_k;
  KeyInterval* const interval = rows.intervals_row(row) + position;
  if (!valid) {
    store(interval, {0, 0});
  } else if (rank < rows.window) {
    store(interval, rows.queries.forever(position));
  }
}

// One CTA for each group of chunks: inverts the order, counts the positions of the chunks by block,
// and writes the intervals that need no walk: those of the w best keys and of the keys never
// chosen.
__global__ void __launch_bounds__(threads) place_ranks(Rows rows) {
  wait_for_previous_kernel();
  __shared__ int counts[max_blocks];
  const int row = static_cast<int>(blockIdx.x) / rows.groups;
  const int group = static_cast<int>(blockIdx.x) % rows.groups;
  const int thread = static_cast<int>(threadIdx.x);
  for (int b = thread; b < rows.blocks; b += threads) counts[b] = 0;
  const std::uint64_t* sorted = rows.sorted_row(row);
  const int first_chunk = group * rows.group_chunks;
  const int end_chunk = min(first_chunk + rows.group_chunks, rows.chunks);
  for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
    __syncthreads();
    for (int b = thread; b < rows.blocks; b += threads) {
      rows.before[rows.block_of_row(row, b) * rows.chunks + chunk] =
          static_cast<std::uint16_t>(counts[b]);
    }
    __syncthreads();
    const int end = rows.chunk_end(chunk);
#pragma unroll 2
    for (int rank = rows.chunk_begin(chunk) + thread; rank < end; rank += threads) {
      const std::uint64_t key = sorted[rank];
      const int position = rows.layout.position(key);
      const bool valid = rows.layout.valid(key);
      place_rank(rows, row, rank, position, valid);
      if (valid) atomicAdd(&counts[position / block_positions], 1);
    }
  }
  __syncthreads();
  for (int b = thread; b < rows.blocks; b += threads) {
    rows.totals[rows.block_of_row(row, b) * rows.groups + group] =
        static_cast<std::uint16_t>(counts[b]);
  }
}

inline constexpr int order_threads = 256;

// The order of the keys of all batches and its inverse, both [rows, Sk]: the key of each rank, -1 from the
// first one that is never chosen, and the rank of each key, Sk where it is never chosen.
__global__ void __launch_bounds__(order_threads)
    store_order(Rows rows, std::int32_t* key_of_rank, std::int32_t* rank_of_key) {
  wait_for_previous_kernel();
  const int blocks = ceil_div(rows.seqlen_k, order_threads);
  const int row = static_cast<int>(blockIdx.x) / blocks;
  const int rank =
      static_cast<int>(blockIdx.x) % blocks * order_threads + static_cast<int>(threadIdx.x);
  if (rank >= rows.seqlen_k) return;
  const std::uint64_t key = rows.sorted_row(row)[rank];
  const int position = rows.layout.position(key);
  const bool valid = rows.layout.valid(key);
  const std::int64_t at = static_cast<std::int64_t>(rows.first_row + row) * rows.seqlen_k;
  key_of_rank[at + rank] = valid ? position : -1;
  rank_of_key[at + position] = valid ? rank : rows.seqlen_k;
}

}  // namespace flash_dmattn::cuda::per_query
