#include <cstdint>

#include "cuda/device.h"
#include "cuda/primitives/launch.h"
#include "cuda/selection/cluster_rows.cuh"
#include "cuda/selection/global/global.cuh"

// Selects the w best keys of few rows in one kernel. A cluster of blocks has a row, and each block keeps consecutive
// keys of the row in registers. Every block sums the histograms of the cluster through shared memory. Rows that fill
// the GPU by themselves, and longer rows, take the kernels of global.cu.
namespace flash_dmattn::cuda::global {
namespace {

// Before a chunk of n queries, the kernel searches for two numbers: the w-th largest and the (w - n)-th largest. The n
// keys of the chunk cannot evict a key above the latter. The keys between both numbers are the *candidates*, which are
// compared with one another and with the keys of the chunk.
//
// Digits have 8 bits, so that a block can read all bins of the cluster, with one barrier of the cluster per digit.
// Histograms count score codes alone. Positions break ties: the last histogram gives each block the number of keys with
// the tied code in later blocks.
struct SelectInClusterKernel {
  using Params = ClusterRows;
  static constexpr int threads = cluster_rows::threads;
  static constexpr int min_blocks = cluster_rows::min_blocks;
  static constexpr int warps = cluster_rows::warps;
  static constexpr int thread_keys = 16;
  static constexpr int block_keys = threads * thread_keys;
  static constexpr int most_blocks = cluster_rows::most_blocks;
  static constexpr int digit_bits = 8;
  static constexpr int bins = 1 << digit_bits;
  static constexpr int most_digits = 32 / digit_bits;
  static constexpr int numbers = 2;  // numbers to search for
  static_assert(threads == numbers * bins, "a thread has a bin of one number");
  static_assert(block_keys == warp_size * bins, "a thread has a word of one number's ties");

  // The known part of a number.
  struct Found {
    std::uint32_t code;  // the leading digits, followed by zeros
    int rank;            // rank among the keys that begin with these digits
    bool is_exact;       // every such key is at least the number
  };

  struct SharedStorage {
    // Counts of the block's keys that begin with the digits found so far, [digit][bins of both numbers]. While both
    // numbers begin with the same digits, the bins of the first serve both.
    std::uint32_t counts[most_digits][threads];
    int warp_sums[warps];
    Found found[numbers];
    std::uint32_t ties[threads];  // [number][32 keys of the block]: bits of keys with its code
    int first[numbers];           // the first of the block's ties that is at least the number
    int candidates;               // the row's number of candidates, in the first block
    std::uint64_t candidate[most_chunk];
    std::uint64_t arrival[most_chunk];
  };

  // The consecutive keys of a block, of which a thread has every `threads`-th.
  struct BlockKeys {
    int row;
    int rank;       // of the block in its cluster
    int slices;     // keys of a thread
    int first_key;  // of the thread
    int end;

    __device__ explicit BlockKeys(const Params& p)
        : row(static_cast<int>(blockIdx.x) / p.blocks),
          rank(static_cast<int>(blockIdx.x) % p.blocks),
          slices(ceil_div(p.rows.seqlen_k, p.blocks * threads)),
          first_key(rank * slices * threads + static_cast<int>(threadIdx.x)),
          end(min((rank + 1) * slices * threads, p.rows.seqlen_k)) {}

    __device__ int key(int i) const { return first_key + i * threads; }
  };
  using Codes = std::uint32_t[thread_keys];  // the score codes of a thread's keys

  // A bit for each key of a thread.
  struct KeyBits {
    unsigned chosen = 0;
    unsigned candidates = 0;
  };

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const BlockKeys keys(p);
    Codes code;  // `never` past the end
    p.rows.keys.codes(p.rows.first_row + keys.row, keys.first_key, threads, keys.end, code);
    prepare(p, keys, shared);
    const std::uint32_t differing = differing_bits(code, keys.slices);
    __syncthreads();
    Found found[numbers] = {{0, p.rows.window, false}, {0, p.rows.window - p.chunk, false}};
    int first[numbers] = {};
    find_numbers(p, keys, code, differing, shared, found, first);
    const KeyBits bits = compare_keys(code, found, first);
    gather_candidates(p.rows, keys, code, bits.candidates, shared);
    cluster_sync();  // from here on no block reads another block's memory
    store_intervals(p, keys, bits);
    if (keys.rank == 0 && p.chunk > 0) evict(p, shared, keys.row);
  }

 private:
  static __device__ void prepare(const Params& p, const BlockKeys& keys, SharedStorage& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) shared.candidates = 0;
    if (keys.rank == 0 && thread < p.chunk) {
      shared.arrival[thread] = p.rows.number(keys.row, p.rows.seqlen_k + thread);
    }
#pragma unroll
    for (int digit = 0; digit < most_digits; ++digit) shared.counts[digit][thread] = 0;
  }

  // Above the highest bit of the result, all keys of the warp are equal.
  static __device__ std::uint32_t differing_bits(const Codes& code, int slices) {
    auto least = static_cast<int>(code[0]);
    int most = least;
#pragma unroll
    for (int i = 1; i < thread_keys; ++i) {
      if (i >= slices) break;
      least = min(least, static_cast<int>(code[i]));
      most = max(most, static_cast<int>(code[i]));
    }
    return static_cast<std::uint32_t>(warp_min(least) ^ warp_max(most));
  }

  // Finds both numbers digit by digit, and of keys that tie with a number the first that is at least the number.
  static __device__ void find_numbers(const Params& p, const BlockKeys& keys, const Codes& code,
                                      std::uint32_t differing, SharedStorage& shared,
                                      Found (&found)[numbers], int (&first)[numbers]) {
    std::uint32_t known = 0;  // mask of the bits of the digits found
    int below = p.rows.number_bits - p.rows.position_bits;
    int digit = 0;
    int tables = 1;
    for (;; ++digit) {
      below -= digit_bits;
      tables = found[0].code == found[1].code ? 1 : numbers;
      const bool is_one_digit = differing >> below == 0;  // equal scores, masked keys
#pragma unroll
      for (int table = 0; table < numbers; ++table) {
        if (table >= tables) break;
        count_digits(shared.counts[digit] + table * bins, found[table].code, known, below, code,
                     keys.slices, is_one_digit);
      }
      cluster_sync();
      find_digit(shared, found, digit, below, tables, keys.rank, p.blocks);
      __syncthreads();
#pragma unroll
      for (int n = 0; n < numbers; ++n) found[n] = shared.found[n];
      if (below == 0 || (found[0].is_exact && found[1].is_exact)) break;
      known |= std::uint32_t{bins - 1} << below;
    }
    if (!found[0].is_exact || !found[1].is_exact) {
      collect_ties(shared, found, code, keys.slices);
      find_first(shared, digit, tables, keys.rank, p.blocks);
      __syncthreads();
#pragma unroll
      for (int n = 0; n < numbers; ++n) first[n] = shared.first[n];
    }
  }

  // Counts the digits of the thread's keys that begin with the `known` bits of `prefix`.
  static __device__ void count_digits(std::uint32_t* counts, std::uint32_t prefix,
                                      std::uint32_t known, int below, const Codes& code, int slices,
                                      bool is_one_digit) {
    const auto add = [&](std::uint32_t key, std::uint32_t amount) {
      const bool begins_alike = ((key ^ prefix) & known) == 0;
      if (begins_alike) atomicAdd(&counts[(key >> below) % bins], amount);
    };
    if (is_one_digit) {
      if (lane_id() == 0) add(code[0], static_cast<std::uint32_t>(slices * warp_size));
      return;
    }
#pragma unroll
    for (int i = 0; i < thread_keys; ++i) {
      if (i >= slices) break;
      add(code[i], 1u);
    }
  }

  static __device__ KeyBits compare_keys(const Codes& code, const Found (&found)[numbers],
                                         const int (&first)[numbers]) {
    // The least code with which key i is at least number n. A tie before the first accepted tie needs a larger code.
    const auto least_code = [&](int i, int n) {
      const bool is_early = i * threads + static_cast<int>(threadIdx.x) < first[n];
      return max(found[n].code + (is_early ? 1u : 0u), ScoredKeys::never + 1);
    };
    KeyBits bits;
#pragma unroll
    for (int i = 0; i < thread_keys; ++i) {
      const unsigned is_chosen = code[i] >= least_code(i, 0) ? 1 : 0;
      const unsigned is_safe = code[i] >= least_code(i, 1) ? 1 : 0;
      bits.chosen |= is_chosen << i;
      bits.candidates |= (is_chosen & ~is_safe) << i;
    }
    return bits;
  }

  // Collects the candidates of the row in the first block.
  static __device__ void gather_candidates(const RadixRows& rows, const BlockKeys& keys,
                                           const Codes& code, unsigned candidates,
                                           SharedStorage& shared) {
    if (candidates == 0) return;
    SharedStorage& first_block = *in_cluster_block(&shared, 0);
    int place = atomicAdd(&first_block.candidates, __popc(candidates));
#pragma unroll
    for (int i = 0; i < thread_keys; ++i) {
      if ((candidates >> i & 1u) == 0) continue;
      first_block.candidate[place++] = rows.number_of(code[i], keys.key(i));
    }
  }

  // Stores the intervals of all keys but the candidates, whose last query `evict` finds.
  static __device__ void store_intervals(const Params& p, const BlockKeys& keys,
                                         const KeyBits& bits) {
    KeyInterval* const intervals = p.intervals_row(keys.row);
#pragma unroll
    for (int i = 0; i < thread_keys; ++i) {
      const int key = keys.key(i);
      if (key >= keys.end) break;
      const KeyInterval seen = p.rows.queries.interval_to_last_query(key);
      const bool is_chosen = (bits.chosen >> i & 1u) != 0;
      if ((bits.candidates >> i & 1u) == 0) {
        store(intervals + key, is_chosen ? seen : KeyInterval{0, 0});
      }
    }
  }

  // Finds the next digit of both numbers. Every block does this by itself.
  static __device__ void find_digit(SharedStorage& shared, const Found (&before)[numbers],
                                    int digit, int below, int tables, int rank, int blocks) {
    const int thread = static_cast<int>(threadIdx.x);
    const int table = thread / bins;
    const int bin = bins - 1 - thread % bins;  // best bin first
    std::uint32_t* const block_count = &shared.counts[digit][table * bins + bin];
    int count = 0;
    if (table < tables) {
      // Every cluster has the same number of loads in flight; a smaller cluster reads each block several times.
      // `blocks` is a power of two, and no two blocks begin with the same block.
#pragma unroll
      for (int i = 0; i < most_blocks; ++i) {
        count += static_cast<int>(*in_cluster_block(block_count, (rank + i) & (blocks - 1)));
      }
      count = count * blocks / most_blocks;
    }
    const int better = sum_before_thread(shared.warp_sums, count);
#pragma unroll
    for (int n = 0; n < numbers; ++n) {
      const int wanted = before[n].rank - better;  // rank among the keys of this bin
      if ((n != table && tables > 1) || wanted <= 0 || wanted > count) continue;
      shared.found[n] = {before[n].code | static_cast<std::uint32_t>(bin) << below, wanted,
                         wanted == count};
    }
  }

  // Collects the keys of the block with the code found, as bits in the order of their positions.
  static __device__ void collect_ties(SharedStorage& shared, const Found (&found)[numbers],
                                      const Codes& code, int slices) {
    const int lane = lane_id();
#pragma unroll
    for (int n = 0; n < numbers; ++n) {
      unsigned word = 0;  // the word of this lane's slice
#pragma unroll
      for (int i = 0; i < thread_keys; ++i) {
        if (i >= slices) break;
        const unsigned ties = warp_ballot(code[i] == found[n].code);
        if (lane == i) word = ties;
      }
      if (lane < thread_keys) shared.ties[n * bins + lane * warps + warp_id()] = word;
    }
  }

  // Finds the first of the block's ties that is at least the number; the most recent ties are.
  static __device__ void find_first(SharedStorage& shared, int digit, int tables, int rank,
                                    int blocks) {
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = lane_id();
    const int n = thread / bins;
    const int table = tables > 1 ? n : 0;
    const auto bin = static_cast<int>(shared.found[n].code % bins);
    std::uint32_t* const ties = &shared.counts[digit][table * bins + bin];
    const bool is_later = lane > rank && lane < blocks;
    const int later = is_later ? static_cast<int>(*in_cluster_block(ties, lane)) : 0;
    const int wanted =
        shared.found[n].rank - warp_sum(later);  // number of ties wanted from the block
    __syncthreads();
    const int place = bins - 1 - thread % bins;  // most recent word first
    const unsigned word = shared.ties[n * bins + place];
    const int count = __popc(word);
    const int left = wanted - sum_before_thread(shared.warp_sums, count);
    if (left > 0 && left <= count) {
      int bit = 0;  // the highest bit with at least `left` ties from it on
#pragma unroll
      for (int step = warp_size / 2; step > 0; step /= 2) {
        if (__popc(word >> (bit + step)) >= left) bit += step;
      }
      shared.first[n] = place * warp_size + bit;
    }
    const bool is_first_thread = thread % bins == 0;
    if (is_first_thread && wanted <= 0) shared.first[n] = block_keys;
    if (is_first_thread && wanted > static_cast<int>(*ties)) shared.first[n] = 0;
  }

  // Sums over the preceding threads that have bins or words of the same number.
  static __device__ int sum_before_thread(int (&warp_sums)[warps], int mine) {
    constexpr int number_warps = warps / numbers;
    const int lane = lane_id();
    const int warp = warp_id();
    const int through = warp_inclusive_sum(mine, lane);
    if (lane == warp_size - 1) warp_sums[warp] = through;
    __syncthreads();
    const bool is_before = lane >= warp / number_warps * number_warps && lane < warp;
    return warp_sum(is_before ? warp_sums[lane] : 0) + through - mine;
  }

  // Called by the first block. A key is evicted by the key of the chunk with which w keys beat it.
  static __device__ void evict(const Params& p, SharedStorage& shared, int row) {
    const RadixRows& rows = p.rows;
    const int thread = static_cast<int>(threadIdx.x);
    const int candidates = shared.candidates;
    const int query = thread - candidates;  // query of a key of the chunk
    if (query >= p.chunk) return;
    const std::uint64_t number = query < 0 ? shared.candidate[thread] : shared.arrival[query];
    // For a key of the chunk that beats all candidates this is an upper bound, which suffices, because at most chunk -
    // 1 keys can beat it.
    int better = rows.window - p.chunk;
#pragma unroll 8
    for (int i = 0; i < candidates; ++i) better += shared.candidate[i] > number ? 1 : 0;
    int last = 0;
#pragma unroll 8
    for (int i = 0; i < p.chunk; ++i) {
      better += shared.arrival[i] > number ? 1 : 0;
      last += better < rows.window ? 1 : 0;
    }
    const int first = max(query, 0);
    const bool is_seen = first < last && number >> rows.position_bits != ScoredKeys::never;
    const auto position = static_cast<int>(number & ((std::uint64_t{1} << rows.position_bits) - 1));
    store(p.intervals_row(row) + position, is_seen ? KeyInterval{first, last} : KeyInterval{0, 0});
  }
};

}  // namespace

int cluster_blocks(int rows, int seqlen_k) {
  const int blocks = cluster_rows::blocks_of_row(seqlen_k);
  const bool fits = seqlen_k <= blocks * SelectInClusterKernel::block_keys;
  const bool has_clusters = most_cluster_blocks(current_device()) > 1;
  return has_clusters && fits && cluster_rows::run_at_once(rows, blocks) ? blocks : 0;
}

void select_in_clusters(const ClusterRows& rows, cudaStream_t stream) {
  launch<SelectInClusterKernel>(std::int64_t{rows.rows.rows} * rows.blocks, rows, stream,
                                {.cluster = rows.blocks});
}

}  // namespace flash_dmattn::cuda::global
