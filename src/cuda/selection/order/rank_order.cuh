#pragma once

#include <cstdint>

#include "cuda/selection/scored_keys.cuh"

// The order of the keys of a row, best first, and its inverse: the input of
// rank_thresholds.cuh.
namespace flash_dmattn::cuda::per_query {

inline constexpr int warps = 16;
inline constexpr int threads = warps * warp_size;
inline constexpr int warp_ranks = 2 * warp_size;        // ranks of a warp of rank_thresholds.cuh
inline constexpr int chunk_ranks = warps * warp_ranks;  // C
inline constexpr int block_positions = 4096;  // positions that are gathered and counted together
inline constexpr int max_blocks = 2048;       // blocks of a row, with a count each in shared memory
inline constexpr std::int64_t max_keys = std::int64_t{max_blocks} * block_positions;

// The most keys of a row that the CTA of a chunk sorts, 8 per thread.
inline constexpr int max_computed_by_sort = 8 * threads;

// The most keys of a row whose order stays in the shared memory of the CTA that sorts it, so that it needs no other
// memory.
inline constexpr int max_kept_by_sort = 1024;

// The chunks that one CTA scatters. Grouping leaves fewer counts for rank_thresholds.cuh to sum.
inline constexpr int max_group_chunks = 16;
static_assert(max_group_chunks * chunk_ranks < 0xffff && block_positions < 0xffff &&
                  chunk_ranks < 0xffff,
              "counts and times are 16 bits wide");

// A sorted key has the score code above the position, so that the better key is the smaller number. The position is
// stored as distance from the end, so that the more recent of equal scores comes first.
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

// A batch of rows and the arrays of its stages.
struct OrderedRows {
  int first_row = 0;  // of the batch
  int rows = 0;
  int seqlen_k = 0;
  int window = 0;  // w <= Sk of the row that a kernel computes (RowWindows)
  KeyLayout layout;
  QueryClip queries;
  KeyInterval* intervals = nullptr;  // [rows of all batches, Sk]

  // Chunk 0 has the first w % C ranks, so that rank w begins a chunk; all other chunks have C.
  int chunks = 0;        // most of a row
  int computed = 0;      // most of a row whose intervals depend on T
  int group_chunks = 1;  // chunks whose positions one CTA counts
  int groups = 0;
  int blocks = 0;  // of positions
  // [rows, Sk rounded up to 4] by position; Sk for keys that are never chosen. Null if the CTA that sorts a row keeps
  // its order and counts.
  std::int32_t* rank_of = nullptr;
  std::int32_t* order = nullptr;  // [rows, Sk] its inverse, -1: never chosen
  // The numbers of positions of a block that belong to these ranks, if every chunk is a group:
  std::uint32_t* totals = nullptr;  // [rows, blocks, groups] ranks of the group
  // Otherwise:
  std::uint16_t* before_in_group =
      nullptr;  // [rows, chunks, blocks] ranks of earlier chunks of the group
  std::uint32_t* before_group = nullptr;  // [rows, groups, blocks] ranks of earlier groups

  // Ranks and order are as large as the packed keys, except for rounding.
  __host__ __device__ std::int64_t all_ranks() const {
    return std::int64_t{rows} * (ceil_div(seqlen_k, 4) * 4);
  }
  __host__ __device__ std::int64_t order_words() const {  // of 8 bytes
    return ceil_div(all_ranks() + std::int64_t{rows} * seqlen_k, std::int64_t{2});
  }
  __host__ __device__ void store_order_in(std::uint64_t* words) {
    rank_of = reinterpret_cast<std::int32_t*>(words);
    order = rank_of + all_ranks();
  }

  __host__ __device__ int chunk_begin(int chunk) const {
    return chunk == 0 ? 0 : window % chunk_ranks + (chunk - 1) * chunk_ranks;
  }
  __device__ int chunk_end(int chunk) const { return min(chunk_begin(chunk + 1), seqlen_k); }
  __device__ int chunk_of(int rank) const {
    const int first = window % chunk_ranks;
    return rank < first ? 0 : (rank - first) / chunk_ranks + 1;
  }
  // The first chunk whose intervals depend on T (rank_thresholds.cuh).
  __host__ __device__ int first_computed() const { return window / chunk_ranks + 1; }
  // Whether the CTA that sorts a row computes its only chunk as well (row_sort.cuh).
  __host__ __device__ bool are_computed_by_sort() const {
    return seqlen_k <= max_computed_by_sort && computed == 1;
  }
  // Whether that CTA can keep what it sorted and counted.
  __host__ __device__ bool can_be_kept_by_sort() const {
    return seqlen_k <= max_kept_by_sort && are_computed_by_sort();
  }
  __device__ std::int32_t* order_row(int row) const {
    return order + static_cast<std::int64_t>(row) * seqlen_k;
  }
  __device__ std::int32_t* rank_row(int row) const {
    return rank_of + static_cast<std::int64_t>(row) * (ceil_div(seqlen_k, 4) * 4);
  }
  __device__ std::int64_t block_of_row(int row, int block) const {
    return static_cast<std::int64_t>(row) * blocks + block;
  }
  __device__ std::uint16_t* before_in_group_of(int row, int chunk) const {
    return before_in_group + (static_cast<std::int64_t>(row) * chunks + chunk) * blocks;
  }
  __device__ std::uint32_t* before_group_of(int row, int group) const {
    return before_group + (static_cast<std::int64_t>(row) * groups + group) * blocks;
  }
  __device__ KeyInterval* intervals_row(int row) const {
    return intervals + static_cast<std::int64_t>(first_row + row) * seqlen_k;
  }
};

// The windows of the rows of a call, a parameter of the kernels that depend on them.
struct RowWindows {
  static constexpr int most_heads = 128;

  int heads = 0;  // 0: all rows have OrderedRows::window
  int window[most_heads] = {};

  // Sets the window of a row of the batch.
  __device__ void set(OrderedRows& rows, int row) const {
    if (heads > 0) rows.window = window[(rows.first_row + row) % heads];
  }
};

// The keys of a row at offsets first, first + step, ..., which the sorts read in the order of falling positions.
// Positions are negative past the end.
template <int Count>
struct KeysDescending {
  int position[Count];
  std::uint32_t code[Count];

  __device__ KeysDescending(const ScoredKeys& keys, const OrderedRows& rows, int row, int first,
                            int step) {
#pragma unroll
    for (int i = 0; i < Count; ++i) position[i] = rows.seqlen_k - 1 - (first + i * step);
    keys.codes(rows.first_row + row, position[0], -step, rows.seqlen_k, code);
  }
};

// Stores the position of a rank, the rank of a position, and the key's interval if it does not depend on T. The
// intervals of the w best keys and of keys that are never chosen do not.
__device__ inline void scatter_rank(const OrderedRows& rows, int row, int rank, int position,
                                    bool valid) {
  rows.order_row(row)[rank] = valid ? position : -1;
  rows.rank_row(row)[position] = valid ? rank : rows.seqlen_k;
  KeyInterval* const interval = rows.intervals_row(row) + position;
  if (!valid || rows.window == 0) {
    store(interval, {0, 0});
  } else if (rank < rows.window) {
    store(interval, rows.queries.interval_to_last_query(position));
  }
}

}  // namespace flash_dmattn::cuda::per_query
