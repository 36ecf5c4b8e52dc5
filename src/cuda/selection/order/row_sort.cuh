#pragma once

#include <cstdint>

#include <cub/block/block_radix_sort.cuh>

#include "cuda/selection/per_query/rank_thresholds.cuh"

namespace flash_dmattn::cuda::per_query {

// A CTA sorts a short row by itself, in one kernel instead of a dozen dependent kernels of a device-wide sort.
template <int Threads>
struct RowSort {
  static constexpr int threads = Threads;
  static constexpr int thread_keys = 8;
  static constexpr int max_keys = threads * thread_keys;
  static_assert(max_keys <= 0x10000, "an offset is 16 bits wide");
  static constexpr int max_chunks = max_keys / chunk_ranks + 2;
  static constexpr int max_blocks = (max_keys + block_positions - 1) / block_positions;
  using Sort = cub::BlockRadixSort<std::uint32_t, threads, thread_keys, std::uint16_t>;
  // A row with a single chunk after its w best keys needs no second kernel.
  static constexpr bool computes_chunk = max_keys == max_computed_by_sort;
  static_assert(!computes_chunk || threads == per_query::threads);
};

// The arrays of OrderedRows for a row that needs only shared memory.
struct KeptRow {
  alignas(16) std::int32_t rank_of[max_kept_by_sort];
  std::int32_t order[max_kept_by_sort];
  std::uint32_t totals[2];  // of its only block: the w best keys, and the chunk after them

  __device__ OrderedRows rows(const OrderedRows& all, int row) {
    OrderedRows own = all;
    own.first_row = all.first_row + row;
    own.rows = 1;
    own.rank_of = rank_of;
    own.order = order;
    own.totals = totals;
    return own;
  }
};

// Computes order and ranks of a row, with the result of scatter_ranks. Keys enter in the order of falling positions,
// which the stable sort keeps among equal scores. Offsets past the end are not better than any key and come last.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    sort_row(ScoredKeys keys, OrderedRows rows, RowWindows windows) {
  wait_for_previous_kernel();
  using Policy = RowSort<Threads>;
  __shared__ union {
    typename Policy::Sort::TempStorage sort;
    ChunkStorage chunk;  // used only with computes_chunk
  } storage;
  __shared__ int counts[Policy::max_blocks]
                       [Policy::max_chunks];  // of positions, by block and chunk
  constexpr int all_counts = Policy::max_blocks * Policy::max_chunks;
  int row = static_cast<int>(blockIdx.x);
  windows.set(rows, row);
  if constexpr (Policy::computes_chunk) {
    __shared__ KeptRow kept;
    if (rows.rank_of == nullptr) {
      rows = kept.rows(rows, row);
      row = 0;
    }
  }
  const int thread = static_cast<int>(threadIdx.x);
  static_assert(all_counts <= Threads);
  if (thread < all_counts) counts[0][thread] = 0;
  const std::uint32_t all = ~std::uint32_t{0} >> (32 - rows.layout.score_bits);
  std::uint32_t worse[Policy::thread_keys];
  std::uint16_t offset[Policy::thread_keys];
  const int first = thread * Policy::thread_keys;
  const KeysDescending<Policy::thread_keys> own(keys, rows, row, first, 1);
#pragma unroll
  for (int i = 0; i < Policy::thread_keys; ++i) {
    offset[i] = static_cast<std::uint16_t>(first + i);
    worse[i] = ~own.code[i] & all;
  }
  typename Policy::Sort(storage.sort)
      .SortBlockedToStriped(worse, offset, 0, rows.layout.score_bits);
#pragma unroll
  for (int i = 0; i < Policy::thread_keys; ++i) {
    const int rank = i * Threads + thread;
    if (rank >= rows.seqlen_k) break;
    const int at = rows.seqlen_k - 1 - offset[i];
    const bool valid = worse[i] != all;  // a key that is never chosen has the code 0
    scatter_rank(rows, row, rank, at, valid);
    if (valid) atomicAdd(&counts[at / block_positions][rows.chunk_of(rank)], 1);
  }
  __syncthreads();
  const int block = thread / Policy::max_chunks;
  const int chunk = thread % Policy::max_chunks;
  if (block < rows.blocks && chunk < rows.chunks) {
    // Every chunk is a group.
    rows.totals[rows.block_of_row(row, block) * rows.groups + chunk] =
        static_cast<std::uint32_t>(counts[block][chunk]);
  }
  if constexpr (Policy::computes_chunk) {
    if (!rows.are_computed_by_sort()) return;
    __syncthreads();  // order, ranks and counts are complete
    compute_chunk(rows, row, rows.first_computed(), storage.chunk);
  }
}

}  // namespace flash_dmattn::cuda::per_query
