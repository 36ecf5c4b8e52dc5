#pragma once

#include <cstdint>

#include "cuda/selection/order/rank_order.cuh"

// Causal per-query selection from ranks.
//
// The keys of a row are sorted, best first; P[r] is the position of rank r. Exactly the ranks before r beat the key of
// rank r, so it is visible to the queries at positions
//
//   P[r] <= t < T(r),   T(r) = the w-th smallest of P[0..r), infinite for r < w,
//
// and T never grows with r. The ranks from w on are therefore cut into chunks that one CTA each computes independently.
// A CTA finds T at the first of its ranks and gathers the *window* below it: in descending order, the positions of
// earlier ranks (present) and of its own ranks (arriving). Within the chunk T only moves down the window: an arrival
// below T moves T to the next lower present position, and any other arrival changes nothing. A chunk of C ranks moves T
// at most C times, so 2C window entries suffice for any w and Sk.
//
// A warp has 64 ranks. Its first T follows from a table of how many entries of each 32 are present by then. From there
// every lane finds the T of its ranks by itself.
namespace flash_dmattn::cuda::per_query {

constexpr int window_entries = 2 * chunk_ranks;
constexpr int window_words = window_entries / warp_size;
constexpr int thread_positions = block_positions / threads;
static_assert(window_words == 2 * warp_size, "a lane reads two words");
static_assert(thread_positions % 4 == 0, "ranks are loaded four at a time");

// Few ranks are sparse: their window spans many blocks of positions, but a thread can keep several of them.
constexpr int thread_ranks = 8;
constexpr int few_ranks = threads * thread_ranks;
constexpr int sparse_positions = 8;  // positions for a rank
constexpr int range_words = 2 * threads;
constexpr int range_positions = range_words * warp_size;  // with a bit each

// The row and the chunk of a CTA.
struct Chunk {
  int row;
  int index;
  int begin;  // ranks
  int end;
};

struct ChunkStorage {
  int present[max_blocks];  // positions of the block that belong to ranks before the chunk
  std::uint8_t arriving[max_blocks];  // whether ranks of the chunk have positions below the first T
  int warp_counts[2][warps];
  int top_block;       // the block of T
  int above;           // present positions of the top block above T
  int threshold;       // T at the first rank
  int counted[warps];  // arrivals below the first T, for each warp
  // The window, with positions descending from T. A present entry has time 0, and the arrival of the chunk's i-th rank
  // has time i + 1, so entry e is present for the i-th rank if time[e] <= i.
  int position[window_entries];
  std::uint16_t time[window_entries];
  std::uint16_t entry_of[chunk_ranks];  // entry of arrival i; 0 if it is above the first T
  // For few ranks: the present or arriving positions, descending, and their number in the preceding words.
  unsigned taken[range_words];
  int taken_before[range_words];
  // The entries of a word that are present at the warp's first rank. An extra column keeps warps in separate banks.
  int present_at[warps][window_words + 1];
};

// Fills present and clears arriving, if every chunk is a group.
__device__ inline void count_earlier_chunks(const OrderedRows& rows, const Chunk& chunk,
                                            ChunkStorage& shared) {
  const int lane = lane_id();
  const int warp = warp_id();
  constexpr int together = 4;  // blocks with loads in flight at a time
  for (int first = warp; first < rows.blocks; first += together * warps) {
    int sum[together];
#pragma unroll
    for (int i = 0; i < together; ++i) {
      const int b = min(first + i * warps, rows.blocks - 1);
      const std::uint32_t* totals = rows.totals + rows.block_of_row(chunk.row, b) * rows.groups;
      sum[i] = lane < chunk.index ? totals[lane] : 0;
      sum[i] += lane + warp_size < chunk.index ? totals[lane + warp_size] : 0;
      for (int g = lane + 2 * warp_size; g < chunk.index; g += warp_size) sum[i] += totals[g];
    }
#pragma unroll
    for (int i = 0; i < together; ++i) {
      const int b = first + i * warps;
      sum[i] = warp_sum(sum[i]);
      if (lane != 0 || b >= rows.blocks) continue;
      shared.present[b] = sum[i];
      shared.arriving[b] = 0;
    }
  }
}

// Fills present, top_block and above, and clears arriving.
__device__ inline void find_top_block(const OrderedRows& rows, const Chunk& chunk,
                                      ChunkStorage& shared) {
  const int lane = lane_id();
  const int warp = warp_id();
  if (rows.before_group != nullptr) {
    const std::uint32_t* const group =
        rows.before_group_of(chunk.row, chunk.index / rows.group_chunks);
    const std::uint16_t* const in_group = rows.before_in_group_of(chunk.row, chunk.index);
    for (int b = static_cast<int>(threadIdx.x); b < rows.blocks; b += threads) {
      shared.present[b] = static_cast<int>(group[b]) + in_group[b];
      shared.arriving[b] = 0;
    }
  } else {
    count_earlier_chunks(rows, chunk, shared);
  }
  __syncthreads();
  if (warp == 0) {
    int before = 0;
    for (int b = lane;; b += warp_size) {
      const int count = b < rows.blocks ? shared.present[b] : 0;
      const int through = before + warp_inclusive_sum(count, lane);
      const unsigned reached = warp_ballot(through >= rows.window);
      if (reached != 0) {  // always true, because at least w ranks are present
        if (lane == __ffs(static_cast<int>(reached)) - 1) {
          shared.top_block = b;
          shared.above = through - rows.window;
        }
        break;
      }
      before = shuffle(through, warp_size - 1);
    }
  }
  __syncthreads();
}

// The ranks of a block's positions; a thread has 8 in descending order. The rank is Sk for a position without one.
struct BlockRanks {
  int top;  // the thread's first position
  int rank[thread_positions];

  __device__ void load(const OrderedRows& rows, int row, int block) {
    top = (block + 1) * block_positions - 1 - static_cast<int>(threadIdx.x) * thread_positions;
    const std::int32_t* const ranks = rows.rank_row(row);
#pragma unroll
    for (int i = 0; i < thread_positions; i += 4) {
      const int lowest = position(i + 3);
      int4 four = make_int4(rows.seqlen_k, rows.seqlen_k, rows.seqlen_k, rows.seqlen_k);
      if (lowest < rows.seqlen_k) four = *reinterpret_cast<const int4*>(ranks + lowest);
      rank[i] = position(i) < rows.seqlen_k ? four.w : rows.seqlen_k;
      rank[i + 1] = position(i + 1) < rows.seqlen_k ? four.z : rows.seqlen_k;
      rank[i + 2] = position(i + 2) < rows.seqlen_k ? four.y : rows.seqlen_k;
      rank[i + 3] = four.x;
    }
  }
  __device__ int position(int i) const { return top - i; }
  // A bit for each rank before `end` at a position up to `highest`.
  __device__ unsigned before(int end, int highest) const {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < thread_positions; ++i) {
      if (rank[i] < end && position(i) <= highest) bits |= 1u << i;
    }
    return bits;
  }
  // rank[i], for an i that is unknown at compile time.
  __device__ int rank_at(int i) const {
    int found = rank[0];
#pragma unroll
    for (int k = 1; k < thread_positions; ++k) found = i == k ? rank[k] : found;
    return found;
  }
};

// Sums `counts` before this warp; `total` receives the sum of all.
__device__ inline int sum_before_warp(const int (&counts)[warps], int& total) {
  const int lane = lane_id();
  const int through = warp_inclusive_sum(lane < warps ? counts[lane] : 0, lane);
  total = shuffle(through, warps - 1);
  const int before = shuffle(through, max(warp_id() - 1, 0));
  return warp_id() == 0 ? 0 : before;
}

// Sums the counts of the threads before this thread; `total` receives the sum of all. It contains one barrier, and
// consecutive calls alternate between the two arrays.
__device__ inline int count_before_thread(int count, int (&warp_counts)[warps], int& total) {
  const int through = warp_inclusive_sum(count, lane_id());
  if (lane_id() == warp_size - 1) warp_counts[warp_id()] = through;
  __syncthreads();
  return sum_before_warp(warp_counts, total) + through - count;
}

// Sets `threshold` to the present position of the top block that has `above` present positions above it.
__device__ inline void find_threshold(const BlockRanks& ranks, const Chunk& chunk,
                                      ChunkStorage& shared) {
  const unsigned present = ranks.before(chunk.begin, ranks.top);
  int total = 0;
  const int before = count_before_thread(__popc(present), shared.warp_counts[0], total);
  const int rest = shared.above - before;
  if (0 <= rest && rest < __popc(present)) {
    shared.threshold = ranks.position(select_bit(present, rest));
  }
  __syncthreads();
}

// The two ranks of a lane, which are 32 apart, so that a warp's ranks are consecutive.
struct LaneRanks {
  int arrival[2];
  int position[2];  // Sk for a rank that does not take part

  __device__ LaneRanks(const OrderedRows& rows, const Chunk& chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      arrival[half] = warp_id() * warp_ranks + half * warp_size + lane_id();
      position[half] = rows.seqlen_k;
      if (chunk.begin + arrival[half] >= chunk.end) continue;
      const int at = rows.order_row(chunk.row)[chunk.begin + arrival[half]];
      if (at >= 0) position[half] = at;
    }
  }
};

// Fills `counted` and `arriving`, and `entry_of` as if the window were empty, where an arrival is above the first T or
// below the whole window. Returns the number of arrivals below T, which bounds the moves of T.
__device__ inline int classify_arrivals(const LaneRanks& own, ChunkStorage& shared) {
  int count = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool below = own.position[half] < shared.threshold;
    shared.entry_of[own.arrival[half]] = static_cast<std::uint16_t>(below ? window_entries : 0);
    if (below) shared.arriving[own.position[half] / block_positions] = 1;
    count += __popc(warp_ballot(below));
  }
  if (lane_id() == 0) shared.counted[warp_id()] = count;
  for (int e = static_cast<int>(threadIdx.x); e < window_entries; e += threads) {
    shared.time[e] = 0xffff;  // a missing entry is never present
  }
  __syncthreads();
  int total = 0;
  sum_before_warp(shared.counted, total);
  return total;
}

// The highest block below `block` with positions to gather, or -1 if there is none.
__device__ inline int next_block(int block, const ChunkStorage& shared) {
  do {
    --block;
  } while (block >= 0 && shared.present[block] == 0 && shared.arriving[block] == 0);
  return block;
}

// Fills the window with T, at least `moves` present positions below it (if there are that many), and all arrivals in
// between. `ranks` are the ranks of the top block. Returns the number of entries.
__device__ inline int gather_window(const OrderedRows& rows, const Chunk& chunk, int moves,
                                    BlockRanks& ranks, ChunkStorage& shared) {
  int block = shared.top_block;
  int present = shared.present[block] - shared.above;  // count after this block is gathered
  int entries = 0;
  for (int parity = 0;; parity ^= 1) {
    const int next = present > moves ? -1 : next_block(block, shared);
    BlockRanks next_ranks;
    if (next >= 0) next_ranks.load(rows, chunk.row, next);  // in flight meanwhile
    const unsigned taken = ranks.before(chunk.end, shared.threshold);
    int total = 0;
    int entry = entries + count_before_thread(__popc(taken), shared.warp_counts[parity], total);
    for (unsigned rest = taken; rest != 0 && entry < window_entries; rest &= rest - 1, ++entry) {
      const int i = __ffs(static_cast<int>(rest)) - 1;
      const int arrival = ranks.rank_at(i) - chunk.begin;
      shared.position[entry] = ranks.position(i);
      shared.time[entry] = static_cast<std::uint16_t>(max(arrival + 1, 0));
      if (arrival >= 0) shared.entry_of[arrival] = static_cast<std::uint16_t>(entry);
    }
    entries += total;
    if (next < 0 || entries >= window_entries) break;
    present += shared.present[next];
    block = next;
    ranks = next_ranks;
  }
  __syncthreads();
  return min(entries, window_entries);
}

// Gathers what gather_window does, from the ranks before the chunk's end. Setting bits sorts their positions.
__device__ inline int gather_few_ranks(const OrderedRows& rows, const Chunk& chunk,
                                       ChunkStorage& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  int below
      [thread_ranks];  // positions below T; negative above T and for keys that are never chosen
#pragma unroll
  for (int i = 0; i < thread_ranks; ++i) {
    const int rank = i * threads + thread;
    const int position = rank < chunk.end ? rows.order_row(chunk.row)[rank] : -1;
    below[i] = position >= 0 ? shared.threshold - position : -1;
  }
  int entries = 0;
  for (int range = 0; range <= shared.threshold && entries < window_entries;
       range += range_positions) {
    const auto bit_of = [&](int i) { return static_cast<unsigned>(below[i] - range); };
    unsigned* const own = shared.taken + 2 * thread;
    own[0] = own[1] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < thread_ranks; ++i) {
      const unsigned bit = bit_of(i);
      if (bit < range_positions) atomicOr(&shared.taken[bit / warp_size], 1u << bit % warp_size);
    }
    __syncthreads();
    const int count = __popc(own[0]);
    int total = 0;
    const int before =
        entries + count_before_thread(count + __popc(own[1]), shared.warp_counts[0], total);
    shared.taken_before[2 * thread] = before;
    shared.taken_before[2 * thread + 1] = before + count;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < thread_ranks; ++i) {
      const unsigned bit = bit_of(i);
      if (bit >= range_positions) continue;
      const unsigned word = bit / warp_size;
      const int entry = shared.taken_before[word] +
                        count_before(shared.taken[word], static_cast<int>(bit % warp_size));
      if (entry >= window_entries) continue;
      const int arrival = i * threads + thread - chunk.begin;
      shared.position[entry] = shared.threshold - below[i];
      shared.time[entry] = static_cast<std::uint16_t>(max(arrival + 1, 0));
      if (arrival >= 0) shared.entry_of[arrival] = static_cast<std::uint16_t>(entry);
    }
    entries += total;
    __syncthreads();
  }
  return min(entries, window_entries);
}

// Fills `present_at`. Lane g counts the entries of a word that are present when warp g begins.
__device__ inline void count_times(int entries, ChunkStorage& shared) {
  const int lane = lane_id();
#pragma unroll
  for (int i = 0; i < window_words / warps; ++i) {
    const int word = i * warps + warp_id();
    unsigned present = 0;
    if (word * warp_size < entries) {
      const int first_warp = ceil_div<int>(shared.time[word * warp_size + lane], warp_ranks);
      present = transpose_bits(bit_range(first_warp, warps), lane);
    }
    if (lane < warps) shared.present_at[lane][word] = __popc(present);
  }
  __syncthreads();
}

// T at the first rank of this warp, as an entry of the window. Earlier arrivals below the first T have moved it down.
__device__ inline int first_threshold(const ChunkStorage& shared) {
  const int lane = lane_id();
  const int warp = warp_id();
  int total = 0;
  int rest = sum_before_warp(shared.counted, total);  // present entries above T
  const int even = shared.present_at[warp][2 * lane];
  const int both = even + shared.present_at[warp][2 * lane + 1];
  const int before = warp_inclusive_sum(both, lane) - both;
  const unsigned reached = warp_ballot(before + both > rest);
  const int found = max(__ffs(static_cast<int>(reached)) - 1, 0);
  rest -= shuffle(before, found);
  const int even_count = shuffle(even, found);
  const bool odd = rest >= even_count;
  const int word = 2 * found + (odd ? 1 : 0);
  const int time = shared.time[word * warp_size + lane];
  const unsigned present = warp_ballot(time <= warp * warp_ranks);
  return word * warp_size + select_bit(present, odd ? rest - even_count : rest);
}

// T at each rank of a lane, as entries of the window. The number of present entries between the warp's first T and the
// T of a rank equals the number of earlier arrivals below the first T.
struct LaneThresholds {
  int entry[2];

  __device__ LaneThresholds(int first, int entries, const int (&arriving)[2],
                            const ChunkStorage& shared) {
    const int lane = lane_id();
    const int first_arrival = warp_id() * warp_ranks;
    const unsigned counted = warp_ballot(arriving[0] > first);
    const unsigned counted_later = warp_ballot(arriving[1] > first);
    int rest[2] = {count_before(counted, lane),
                   __popc(counted) + count_before(counted_later, lane)};
    entry[0] = entry[1] = -1;
    for (int word = first / warp_size; word * warp_size < entries; ++word) {
      const int time = shared.time[word * warp_size + lane];
      unsigned present = warp_ballot(time <= first_arrival);
      if (word == first / warp_size) present &= full_mask << (first % warp_size);
      unsigned arrived[2];  // arrivals before the rank
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool here = arriving[half] > first && arriving[half] / warp_size == word;
        arrived[half] = here ? 1u << (arriving[half] % warp_size) : 0;
      }
      if (warp_any((arrived[0] | arrived[1]) != 0)) {
        const unsigned before = warp_exclusive_or(arrived[0], lane);
        const unsigned all = shuffle(before | arrived[0], warp_size - 1);
        arrived[0] = before;
        arrived[1] = all | warp_exclusive_or(arrived[1], lane);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned visible = present | arrived[half];
        const int count = __popc(visible);
        if (entry[half] < 0 && rest[half] < count) {
          entry[half] = word * warp_size + select_bit(visible, rest[half]);
        }
        rest[half] -= count;
      }
      if (!warp_any(entry[0] < 0 || entry[1] < 0)) break;
    }
  }
};

// Computes the intervals of a chunk with `threads` threads.
__device__ inline void compute_chunk(const OrderedRows& rows, int row, int index,
                                     ChunkStorage& shared) {
  const Chunk chunk{row, index, rows.chunk_begin(index), rows.chunk_end(index)};
  // A row whose window has room for more keys than that of another row has fewer chunks.
  if (chunk.begin >= rows.seqlen_k || rows.window == 0) return;
  // Keys that are never chosen have the last ranks, and scatter_rank (rank_order.cuh) has written their intervals.
  const bool is_chosen = rows.order_row(chunk.row)[chunk.begin] >= 0;
  const LaneRanks own(rows, chunk);  // these loads and the load above are in flight together
  if (!is_chosen) return;

  find_top_block(rows, chunk, shared);
  BlockRanks ranks;
  ranks.load(rows, chunk.row, shared.top_block);
  find_threshold(ranks, chunk, shared);
  const int moves = classify_arrivals(own, shared);
  const bool is_sparse = chunk.end <= min(few_ranks, rows.seqlen_k / sparse_positions);
  const int entries = is_sparse ? gather_few_ranks(rows, chunk, shared)
                                : gather_window(rows, chunk, moves, ranks, shared);
  count_times(entries, shared);

  const int first = first_threshold(shared);
  const int arriving[2] = {shared.entry_of[own.arrival[0]], shared.entry_of[own.arrival[1]]};
  const LaneThresholds thresholds(first, entries, arriving, shared);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (own.position[half] == rows.seqlen_k) continue;
    KeyInterval interval{0, 0};
    if (arriving[half] > thresholds.entry[half]) {
      const int until = shared.position[thresholds.entry[half]];
      interval = rows.queries.interval_until(own.position[half], until);
    }
    store(rows.intervals_row(chunk.row) + own.position[half], interval);
  }
}

}  // namespace flash_dmattn::cuda::per_query
