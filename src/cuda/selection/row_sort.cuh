#pragma once

#include <cstdint>

#include <cub/block/block_radix_sort.cuh>

#include "cuda/selection/rank_order.cuh"

namespace flash_dmattn::cuda::per_query {

// A CTA sorts a short row alone: one kernel instead of a device-wide sort's dozen, each of which waits
// for the one before.
template <int Threads>
struct RowSort {
  static constexpr int threads = Threads;
  static constexpr int thread_keys = 8;
  static constexpr int max_keys = threads * thread_keys;
  static_assert(max_keys <= 0x10000, "a place is 16 bits wide");
  using Sort = cub::BlockRadixSort<std::uint32_t, threads, thread_keys, std::uint16_t>;
};

// sorted [rows, Sk], the best first. Keys enter in the order of falling positions, which the sort,
// being stable, keeps among equals; places past the end are worse than or equal to all and come last.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    sort_row(ScoredKeys keys, Rows rows, std::uint64_t* sorted) {
  using Policy = RowSort<Threads>;
  __shared__ typename Policy::Sort::TempStorage storage;
  const int row = static_cast<int>(blockIdx.x);
  const std::uint32_t all = ~std::uint32_t{0} >> (32 - rows.layout.score_bits);
  std::uint32_t worse[Policy::thread_keys];
  std::uint16_t place[Policy::thread_keys];
#pragma unroll
  for (int i = 0; i < Policy::thread_keys; ++i) {
    const int at = static_cast<int>(threadIdx.x) * Policy::thread_keys + i;
    place[i] = static_cast<std::uint16_t>(at);
    worse[i] =
        at < rows.seqlen_k ? ~keys.code(rows.first_row + row, rows.seqlen_k - 1 - at) & all : all;
  }
  typename Policy::Sort(storage).SortBlockedToStriped(worse, place, 0, rows.layout.score_bits);
#pragma unroll
  for (int i = 0; i < Policy::thread_keys; ++i) {
    const int rank = i * Threads + static_cast<int>(threadIdx.x);
    if (rank < rows.seqlen_k) {
      sorted[static_cast<std::int64_t>(row) * rows.seqlen_k + rank] =
          rows.layout.pack(row, ~worse[i], rows.seqlen_k - 1 - place[i]);
    }
  }
}

}  // namespace flash_dmattn::cuda::per_query
