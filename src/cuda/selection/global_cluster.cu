#include <algorithm>
#include <bit>
#include <cstdint>

#include "cuda/common/launch.h"
#include "cuda/device.h"
#include "cuda/selection/global.cuh"

// The w best keys of few rows in one kernel: a cluster of blocks has a row, each block a part of its keys in
// registers, and the blocks add their histograms through shared memory. Rows that fill the GPU by themselves, and
// longer ones, take the kernels of global.cu.
namespace flash_dmattn::cuda::global {
namespace {

// Before a chunk of n queries two numbers are searched for: the w-th largest, and the (w - n)-th, above which no key
// can be evicted by the n keys of the chunk. The keys between them are the *candidates*: they and the keys of the
// chunk are compared with one another.
struct SelectInClusterKernel {
  using Params = ClusterRows;
  static constexpr int threads = 1024;
  static constexpr int min_blocks = 1;
  static constexpr int warps = threads / warp_size;
  static constexpr int thread_keys = 8;
  static constexpr int block_keys = threads * thread_keys;
  static constexpr int thread_bins = bins / threads;
  static constexpr int numbers = 2;  // that are searched for
  static_assert(warps == warp_size, "a lane has the sum of a warp");

  struct SharedStorage {
    // Of the keys that begin with the digits of a number found so far. Where both numbers begin with the same, the
    // first table serves both.
    std::uint32_t counts[numbers][bins];  // the block's
    std::uint32_t totals[numbers][bins];  // the cluster's, of the bins that are this block's to add
    int warp_sums[numbers][warps];
    Found found[numbers];
    bool is_exact[numbers];  // every key that begins with these digits is at least the number
    int candidates;          // of the row, in the first block, and those of the chunk
    std::uint64_t candidate[most_chunk];
    std::uint64_t arrival[most_chunk];
  };

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const RadixRows& rows = p.rows;
    const int row = static_cast<int>(blockIdx.x) / p.blocks;
    const int rank = static_cast<int>(blockIdx.x) % p.blocks;
    const int thread = static_cast<int>(threadIdx.x);
    int position[thread_keys];
    std::uint32_t code[thread_keys];
#pragma unroll
    for (int i = 0; i < thread_keys; ++i) {
      const int key = (i * p.blocks + rank) * threads + thread;
      position[i] = key < rows.seqlen_k ? key : -1;
    }
    rows.keys.codes(rows.first_row + row, rank * threads + thread, p.blocks * threads,
                    rows.seqlen_k, code);
    const auto number = [&](int i) { return rows.number_of(code[i], position[i]); };
    if (thread == 0) shared.candidates = 0;

    Found found[numbers] = {{0, rows.window}, {0, rows.window - p.chunk}};
    int below = rows.number_bits;
    for (int digit = 0; below > 0; ++digit) {
      const int width = below - rows.bits_below(digit);
      below -= width;
      const int tables = found[0].digits == found[1].digits ? 1 : numbers;
      for (int i = thread; i < tables * bins; i += threads) shared.counts[i / bins][i % bins] = 0;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < thread_keys; ++i) {
        if (position[i] < 0) continue;
        const std::uint64_t digits = number(i) >> below;
        const auto bin = static_cast<int>(digits & ((std::uint64_t{1} << width) - 1));
#pragma unroll
        for (int table = 0; table < numbers; ++table) {
          const bool counts = table < tables && digits >> width == found[table].digits;
          if (counts) atomicAdd(&shared.counts[table][bin], 1u);
        }
      }
      cluster_sync();
      add_counts(shared, tables, rank, p.blocks);
      cluster_sync();
      for (int table = 0; table < tables; ++table)
        find_digit(shared, found, table, tables == 1, width, p.blocks);
      __syncthreads();
      for (int n = 0; n < numbers; ++n) found[n] = shared.found[n];
      if (shared.is_exact[0] && shared.is_exact[1]) break;
    }

    const std::uint64_t last = found[0].digits << below;
    const std::uint64_t safe = found[1].digits << below;
    const auto is_chosen = [&](int i) {
      return position[i] >= 0 && number(i) >= last && code[i] != ScoredKeys::never;
    };
    const auto is_candidate = [&](int i) { return is_chosen(i) && number(i) < safe; };
    SharedStorage& first_block = *in_cluster_block(&shared, 0);
#pragma unroll
    for (int i = 0; i < thread_keys; ++i) {
      if (!is_candidate(i)) continue;
      first_block.candidate[atomicAdd(&first_block.candidates, 1)] = number(i);
    }
    cluster_sync();  // from here on no block reads another one's memory
    KeyInterval* const intervals = p.intervals_row(row);
#pragma unroll
    for (int i = 0; i < thread_keys; ++i) {
      if (position[i] < 0 || is_candidate(i)) continue;
      store(intervals + position[i],
            is_chosen(i) ? rows.queries.forever(position[i]) : KeyInterval{0, 0});
    }
    if (rank == 0 && p.chunk > 0) evict(p, shared, row);
  }

 private:
  // The bins are shared among the blocks of a cluster.
  static __device__ void add_counts(SharedStorage& shared, int tables, int rank, int blocks) {
    const int own = bins / blocks;
    for (int i = static_cast<int>(threadIdx.x); i < tables * own; i += threads) {
      const int table = i / own;
      const int bin = rank * own + i % own;
      std::uint32_t total = 0;
#pragma unroll 16  // all loads on their way at once
      for (int b = 0; b < blocks; ++b) total += *in_cluster_block(&shared.counts[table][bin], b);
      shared.totals[table][bin] = total;
    }
  }

  // The next digit of the numbers that a table serves, by every block for itself.
  static __device__ void find_digit(SharedStorage& shared, const Found (&before)[numbers],
                                    int table, bool is_only_table, int width, int blocks) {
    const int own = bins / blocks;
    const int first_bin = bins - 1 - static_cast<int>(threadIdx.x) * thread_bins;  // the best first
    std::uint32_t count[thread_bins];
    int sum = 0;
#pragma unroll
    for (int i = 0; i < thread_bins; ++i) {
      const int bin = first_bin - i;
      count[i] = *in_cluster_block(&shared.totals[table][bin], bin / own);
      sum += static_cast<int>(count[i]);
    }
    std::int64_t better = sum_before_thread(shared.warp_sums[table], sum);
#pragma unroll
    for (int i = 0; i < thread_bins; ++i) {
#pragma unroll
      for (int n = 0; n < numbers; ++n) {
        const std::int64_t wanted = before[n].rank - better;  // among the keys of this bin
        if ((n != table && !is_only_table) || wanted <= 0 || wanted > count[i]) continue;
        shared.found[n] = {before[n].digits << width | static_cast<std::uint64_t>(first_bin - i),
                           wanted};
        shared.is_exact[n] = wanted == count[i];
      }
      better += count[i];
    }
  }

  // Of the threads before this one.
  static __device__ int sum_before_thread(int (&warp_sums)[warps], int mine) {
    const int through = warp_inclusive_sum(mine, lane_id());
    if (lane_id() == warp_size - 1) warp_sums[warp_id()] = through;
    __syncthreads();
    const int of_warp = warp_sums[lane_id()];
    return warp_sum(lane_id() < warp_id() ? of_warp : 0) + through - mine;
  }

  // By the first block. A key is evicted by the key of the chunk with which w keys beat it.
  static __device__ void evict(const Params& p, SharedStorage& shared, int row) {
    const RadixRows& rows = p.rows;
    const int thread = static_cast<int>(threadIdx.x);
    const int candidates = shared.candidates;
    if (thread < p.chunk) shared.arrival[thread] = rows.number(row, rows.seqlen_k + thread);
    __syncthreads();
    const int query = thread - candidates;  // of a key of the chunk
    if (query >= p.chunk) return;
    const std::uint64_t number = query < 0 ? shared.candidate[thread] : shared.arrival[query];
    // For a key of the chunk that beats all candidates it is a bound, which is as good: chunk - 1 keys can beat it.
    int better = rows.window - p.chunk;
    for (int i = 0; i < candidates; ++i) better += shared.candidate[i] > number ? 1 : 0;
    int last = 0;
    for (; last < p.chunk; ++last) {
      better += shared.arrival[last] > number ? 1 : 0;
      if (better >= rows.window) break;
    }
    const int first = max(query, 0);
    const bool is_seen = first < last && number >> rows.position_bits != ScoredKeys::never;
    const auto position = static_cast<int>(number & ((std::uint64_t{1} << rows.position_bits) - 1));
    store(p.intervals_row(row) + position, is_seen ? KeyInterval{first, last} : KeyInterval{0, 0});
  }
};

}  // namespace

int cluster_blocks(int rows, int seqlen_k) {
  const DeviceProperties& device = current_device();
  const int most_blocks = most_cluster_blocks(device);
  // Two thousand keys to a block: more blocks add up more counts.
  const auto wanted = static_cast<unsigned>(ceil_div(seqlen_k, 2048));
  const int blocks = std::min(static_cast<int>(std::bit_ceil(wanted)), most_blocks);
  const bool fits = seqlen_k <= blocks * SelectInClusterKernel::block_keys;
  return most_blocks > 1 && fits && std::int64_t{rows} * blocks <= 2 * device.multiprocessors
             ? blocks
             : 0;
}

void select_in_clusters(const ClusterRows& rows, cudaStream_t stream) {
  launch<SelectInClusterKernel>(std::int64_t{rows.rows.rows} * rows.blocks, rows, stream,
                                {.cluster = rows.blocks});
}

}  // namespace flash_dmattn::cuda::global
