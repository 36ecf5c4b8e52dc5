#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "cuda/common/launch.h"
#include "cuda/device.h"
#include "cuda/selection/global.cuh"

// The w best keys of few rows in one kernel: a cluster of blocks has a row, each block its part of the keys in
// registers. Where rows fill the GPU anyway, and for longer ones, there are the kernels of global.cu.
namespace flash_dmattn::cuda::global {
namespace {

struct SelectInClusterKernel {
  struct Params {
    RadixRows rows;
    int blocks;  // of a cluster
    int pitch;   // of the rows of intervals
    KeptKeys kept;
  };
  static constexpr int threads = 1024;
  static constexpr int min_blocks = 1;
  static constexpr int thread_keys = 8;
  static constexpr int block_keys = threads * thread_keys;
  static constexpr int warps = threads / warp_size;
  static constexpr int thread_bins = bins / threads;

  struct SharedStorage {
    std::uint32_t counts[bins];  // of the block's keys
    std::uint32_t totals[bins];  // of the cluster's, for the bins that are this block's to add
    std::uint32_t warp_sums[warps];
    int chosen;  // keys of the block
    Found found;
    bool exact;  // every key of the digit found belongs to the best
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
    rows.keys.codes(rows.first_row + row, position, code);
    const auto number = [&](int i) {
      return static_cast<std::uint64_t>(code[i]) << rows.position_bits |
             static_cast<std::uint64_t>(position[i]);
    };

    Found found{0, rows.window};
    int below = rows.number_bits;
    for (int digit = 0; below > 0; ++digit) {
      const int width = below - rows.bits_below(digit);
      below = rows.bits_below(digit);
#pragma unroll
      for (int i = 0; i < thread_bins; ++i) shared.counts[i * threads + thread] = 0;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < thread_keys; ++i) {
        const std::uint64_t digits = number(i) >> below;
        const bool counts = position[i] >= 0 && digits >> width == found.digits;
        count_digit(shared, counts, static_cast<int>(digits & ((std::uint64_t{1} << width) - 1)));
      }
      cluster_sync();
      add_counts(shared, rank, p.blocks);
      cluster_sync();
      find_digit(shared, found, width, p.blocks);
      found = shared.found;
      if (shared.exact) break;
    }
    cluster_sync();  // before a block ends whose counts are being read

    const std::uint64_t last = found.digits << below;
    KeyInterval* const intervals =
        rows.intervals + static_cast<std::int64_t>(rows.first_row + row) * p.pitch;
    bool chosen[thread_keys];
    int count = 0;
#pragma unroll
    for (int i = 0; i < thread_keys; ++i) {
      chosen[i] = position[i] >= 0 && number(i) >= last && code[i] != ScoredKeys::never;
      count += chosen[i] ? 1 : 0;
      if (position[i] < 0) continue;
      store(intervals + position[i],
            chosen[i] ? rows.queries.forever(position[i]) : KeyInterval{0, 0});
    }
    if (p.kept.keys == nullptr) return;
    int place = place_of(shared, count, rank, p.blocks, p.kept.count + row);
    std::int32_t* const kept = p.kept.keys + static_cast<std::int64_t>(row) * rows.window;
#pragma unroll
    for (int i = 0; i < thread_keys; ++i) {
      if (chosen[i]) kept[place++] = position[i];
    }
  }

 private:
  // Lanes that all have one bin add at once: equal scores would add one after the other.
  static __device__ void count_digit(SharedStorage& shared, bool counts, int bin) {
    const unsigned lanes = warp_ballot(counts);
    if (lanes == 0) return;
    const int first = __ffs(static_cast<int>(lanes)) - 1;
    const int first_bin = shuffle(bin, first);  // by every lane, whether it counts or not
    if (warp_all(!counts || bin == first_bin)) {
      if (lane_id() == first) atomicAdd(&shared.counts[bin], static_cast<unsigned>(__popc(lanes)));
    } else if (counts) {
      atomicAdd(&shared.counts[bin], 1u);
    }
  }

  // The bins are shared among the blocks of a cluster.
  static __device__ void add_counts(SharedStorage& shared, int rank, int blocks) {
    const int own = bins / blocks;
    for (int i = static_cast<int>(threadIdx.x); i < own; i += threads) {
      const int bin = rank * own + i;
      std::uint32_t total = 0;
#pragma unroll 16  // all loads on their way at once
      for (int b = 0; b < blocks; ++b) total += *in_cluster_block(&shared.counts[bin], b);
      shared.totals[bin] = total;
    }
  }

  // Where the chosen keys of this thread go among all of the row, whose number the last block stores.
  static __device__ int place_of(SharedStorage& shared, int count, int rank, int blocks,
                                 std::int32_t* total) {
    const int through = warp_inclusive_sum(count, lane_id());
    if (lane_id() == warp_size - 1) {
      shared.warp_sums[warp_id()] = static_cast<std::uint32_t>(through);
    }
    __syncthreads();
    const int sums = static_cast<int>(shared.warp_sums[lane_id()]);
    const int before = warp_sum(lane_id() < warp_id() ? sums : 0);
    if (warp_id() == 0) {
      const int all = warp_sum(sums);
      if (lane_id() == 0) shared.chosen = all;
    }
    cluster_sync();
    int first = 0;
#pragma unroll 16
    for (int b = 0; b < rank; ++b) first += *in_cluster_block(&shared.chosen, b);
    if (rank == blocks - 1 && threadIdx.x == 0) *total = first + shared.chosen;
    cluster_sync();  // before a block ends whose number is being read
    return first + before + through - count;
  }

  // The next digit of the w-th largest number, by every block for itself.
  static __device__ void find_digit(SharedStorage& shared, Found before, int width, int blocks) {
    const int own = bins / blocks;
    const int thread = static_cast<int>(threadIdx.x);
    const int first_bin = bins - 1 - thread * thread_bins;  // the best first
    std::uint32_t count[thread_bins];
    int sum = 0;
#pragma unroll
    for (int i = 0; i < thread_bins; ++i) {
      const int bin = first_bin - i;
      count[i] = *in_cluster_block(&shared.totals[bin], bin / own);
      sum += static_cast<int>(count[i]);
    }
    const int through = warp_inclusive_sum(sum, lane_id());
    if (lane_id() == warp_size - 1) {
      shared.warp_sums[warp_id()] = static_cast<std::uint32_t>(through);
    }
    __syncthreads();
    const int warps_before = static_cast<int>(shared.warp_sums[lane_id()]);
    std::int64_t better = warp_sum(lane_id() < warp_id() ? warps_before : 0) + (through - sum);
#pragma unroll
    for (int i = 0; i < thread_bins; ++i) {
      if (better < before.rank && before.rank <= better + count[i]) {
        shared.found = {before.digits << width | static_cast<std::uint64_t>(first_bin - i),
                        before.rank - better};
        shared.exact = before.rank - better == count[i];
      }
      better += count[i];
    }
    __syncthreads();
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
  return most_blocks > 1 && fits && rows * blocks <= 2 * device.multiprocessors ? blocks : 0;
}

void select_best_in_clusters(const RadixRows& rows, int blocks, int pitch, const KeptKeys& kept,
                             cudaStream_t stream) {
  launch<SelectInClusterKernel>(std::int64_t{rows.rows} * blocks, {rows, blocks, pitch, kept},
                                stream, blocks);
}

}  // namespace flash_dmattn::cuda::global
