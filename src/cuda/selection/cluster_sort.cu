#include "cuda/selection/cluster_sort.h"

#include <cstdint>

#include "cuda/common/launch.h"
#include "cuda/selection/cluster_rows.cuh"

namespace flash_dmattn::cuda::per_query {
namespace {

// Sorts a row digit by digit, the lowest first, equal keys staying in order. For each digit a block counts its keys,
// adds up the counts of the cluster, orders its own keys by the digit in shared memory, and stores them to the blocks
// that have them next: neighbours, which then lie together, travel together.
struct SortRowKernel {
  struct Params {
    ScoredKeys keys;
    OrderedRows rows;
    std::uint64_t* sorted;
    int digits;  // of a score
    int blocks;  // of a cluster
  };
  static constexpr int threads = cluster_rows::threads;
  static constexpr int min_blocks = cluster_rows::min_blocks;
  static constexpr int warps = cluster_rows::warps;
  static constexpr int thread_keys = 4;
  static constexpr int warp_keys = thread_keys * warp_size;
  static constexpr int block_keys = threads * thread_keys;
  static constexpr int max_keys = cluster_rows::most_blocks * block_keys;
  static constexpr int digit_bits = 8;
  static constexpr int bins = 1 << digit_bits;  // one for each of the first threads
  static constexpr int max_chunks = max_keys / chunk_ranks + 2;
  static constexpr int max_position_blocks = max_keys / block_positions;
  static_assert(bins % warp_size == 0 && bins <= threads);
  static_assert(max_keys <= 0x8000, "two sums of counts in one word");

  struct SharedStorage {
    std::uint64_t keys[block_keys];      // of the block; other blocks store them
    std::uint64_t by_digit[block_keys];  // the same in the order of the next digit
    int offsets[warps][bins];            // in by_digit, of a warp's keys of each digit
    std::uint16_t counts[bins];          // of the block's keys
    int to_row[bins];                    // offset in the row less that in by_digit
    std::uint32_t warp_sums[warps];
    int positions[max_position_blocks][max_chunks];  // of the block's keys, by block and chunk
  };

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const int row = static_cast<int>(blockIdx.x) / p.blocks;
    const int rank = static_cast<int>(blockIdx.x) % p.blocks;
    const int thread = static_cast<int>(threadIdx.x);
    const int begin = rank * block_keys;
    const int count = min(max(p.rows.seqlen_k - begin, 0), block_keys);
    const int first = warp_id() * warp_keys + lane_id();  // key of the block
    for (int i = thread; i < max_position_blocks * max_chunks; i += threads) {
      shared.positions[0][i] = 0;
    }
    std::uint64_t key[thread_keys];
    const KeysDescending<thread_keys> own(p.keys, p.rows, row, begin + first, warp_size);
#pragma unroll
    for (int i = 0; i < thread_keys; ++i) {
      key[i] = p.rows.layout.pack(row, own.code[i], own.position[i]);
    }
    int shift = p.rows.layout.position_bits;
    for (int digit = 0;; ++digit, shift += digit_bits) {
      order_by_digit(shared, key, shift, first, count, rank, p.blocks);
      if (digit + 1 == p.digits) break;
#pragma unroll
      for (int i = 0; i < thread_keys; ++i) {
        const int at = i * threads + thread;
        if (at >= count) break;
        const std::uint64_t next = shared.by_digit[at];
        const int to = at + shared.to_row[bin_of(next, shift)];
        *in_cluster_block(&shared.keys[to % block_keys], to / block_keys) = next;
      }
      cluster_sync();
#pragma unroll
      for (int i = 0; i < thread_keys; ++i) {
        const int at = first + i * warp_size;
        key[i] = at < count ? shared.keys[at] : 0;
      }
    }
    store_ranks(p, shared, row, rank, count, shift);
  }

 private:
  static __device__ int bin_of(std::uint64_t key, int shift) {
    return static_cast<int>(key >> shift) & (bins - 1);
  }

  // Fills by_digit and to_row. No block stores keys for this one before all threads have passed the barrier of the
  // cluster with theirs.
  static __device__ void order_by_digit(SharedStorage& shared,
                                        const std::uint64_t (&key)[thread_keys], int shift,
                                        int first, int count, int rank, int blocks) {
    const int thread = static_cast<int>(threadIdx.x);
    int* const offsets = shared.offsets[warp_id()];
#pragma unroll
    for (int bin = 0; bin < bins; bin += warp_size) offsets[bin + lane_id()] = 0;
    __syncwarp();
    int bin[thread_keys];
    int offset[thread_keys];  // among the keys of the warp with the same digit
#pragma unroll
    for (int i = 0; i < thread_keys; ++i) {
      bin[i] = first + i * warp_size < count ? bin_of(key[i], shift) : -1;
    }
    take_numbers<digit_bits>(bin, offsets, offset);
    __syncthreads();
    std::uint32_t in_block = 0;
    if (thread < bins) {
#pragma unroll
      for (int w = 0; w < warps; ++w)
        in_block += static_cast<std::uint32_t>(shared.offsets[w][thread]);
      shared.counts[thread] = static_cast<std::uint16_t>(in_block);
    }
    cluster_sync();
    // Sums over the smaller digits, of the row below and of the block above.
    cluster_rows::BlockSums<std::uint32_t> sums;
    std::uint32_t through = 0;
    if (thread < bins) {
      sums.add(&shared.counts[thread], rank, blocks);
      through = static_cast<std::uint32_t>(
          warp_inclusive_sum(static_cast<int>(sums.all | in_block << 16), lane_id()));
      if (lane_id() == warp_size - 1) shared.warp_sums[warp_id()] = through;
    }
    __syncthreads();
    if (thread < bins) {
      const std::uint32_t of_warp = lane_id() < warp_id() ? shared.warp_sums[lane_id()] : 0;
      const std::uint32_t before = warp_sum(of_warp) + through - (sums.all | in_block << 16);
      auto next = static_cast<int>(before >> 16);
      shared.to_row[thread] = static_cast<int>((before & 0xffffu) + sums.before) - next;
#pragma unroll
      for (int w = 0; w < warps; ++w) {
        const int in_warp = shared.offsets[w][thread];
        shared.offsets[w][thread] = next;
        next += in_warp;
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < thread_keys; ++i) {
      if (bin[i] >= 0) shared.by_digit[offsets[bin[i]] + offset[i]] = key[i];
    }
    __syncthreads();
  }

  // Stores the same as scatter_ranks, once by_digit is in the order of the last digit. The counts come first, so that
  // the barrier does not wait for the stores.
  static __device__ void store_ranks(const Params& p, SharedStorage& shared, int row, int rank,
                                     int count, int shift) {
    const OrderedRows& rows = p.rows;
    const int thread = static_cast<int>(threadIdx.x);
    std::uint64_t key[thread_keys];
    int rank_of_key[thread_keys];
#pragma unroll
    for (int i = 0; i < thread_keys; ++i) {
      const int at = i * threads + thread;
      rank_of_key[i] = -1;
      if (at >= count) continue;
      key[i] = shared.by_digit[at];
      rank_of_key[i] = at + shared.to_row[bin_of(key[i], shift)];
      if (rows.layout.valid(key[i])) {
        const int block = rows.layout.position(key[i]) / block_positions;
        atomicAdd(&shared.positions[block][rows.chunk_of(rank_of_key[i])], 1);
      }
    }
    cluster_sync();
#pragma unroll
    for (int i = 0; i < thread_keys; ++i) {
      if (rank_of_key[i] < 0) break;
      p.sorted[static_cast<std::int64_t>(row) * rows.seqlen_k + rank_of_key[i]] = key[i];
      scatter_rank(rows, row, rank_of_key[i], rows.layout.position(key[i]),
                   rows.layout.valid(key[i]));
    }
    for (int i = thread * p.blocks + rank; i < rows.blocks * rows.chunks; i += threads * p.blocks) {
      const int block = i / rows.chunks;
      const int chunk = i % rows.chunks;
      cluster_rows::BlockSums<int> sums;
      sums.add(&shared.positions[block][chunk], rank, p.blocks);
      store_count(rows, row, block, chunk, sums.all);
    }
    cluster_leave();
  }
};

}  // namespace

int sort_cluster_blocks(const OrderedRows& rows) {
  const int blocks = cluster_rows::blocks_of_row(rows.seqlen_k);
  const bool fits = rows.seqlen_k <= blocks * SortRowKernel::block_keys;
  return blocks > 1 && fits && cluster_rows::run_at_once(rows.rows, blocks) ? blocks : 0;
}

void sort_in_clusters(const ScoredKeys& keys, const OrderedRows& rows, std::uint64_t* sorted,
                      cudaStream_t stream) {
  const int blocks = sort_cluster_blocks(rows);
  const int digits = rows.layout.score_bits / SortRowKernel::digit_bits;
  launch<SortRowKernel>(std::int64_t{rows.rows} * blocks, {keys, rows, sorted, digits, blocks},
                        stream, {.cluster = blocks});
}

}  // namespace flash_dmattn::cuda::per_query
