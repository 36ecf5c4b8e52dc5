#pragma once

#include "cuda/kv_cache/slots.cuh"
#include "cuda/primitives/integers.h"

// A key is evicted by the first pending token with which w keys beat it. The number of keys that beat it only grows, so
// each key can be compared with all others in any order.
namespace flash_dmattn::cuda::kv {

inline constexpr std::int32_t stays = 0x7fffffff;

struct PendingParams {
  Slots cache;
  int batch;
  const std::int32_t* keep;  // [B] number of pending tokens that count; null for all
  int seqlen_q;              // number of queries of the intervals
  // Outputs for [B, Hkv, w + pending] keys, one of which is written: the pending token that evicts each key (`stays` if
  // none does, -1 if there is no such key), or the queries that see it.
  std::int32_t* evicted_by = nullptr;
  KeyInterval* intervals = nullptr;

  __host__ __device__ int keys() const { return cache.window + cache.pending; }
};

// A thread computes a key.
struct FindEvictionsKernel {
  using Params = PendingParams;
  static constexpr int threads = 256;
  static constexpr int min_blocks = 2;

  struct SharedStorage {
    ScoredSlot others[threads];
  };

  static long blocks(const Params& p) {
    return static_cast<long>(p.batch) * p.cache.heads * ceil_div(p.keys(), threads);
  }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const int parts = ceil_div(p.keys(), threads);
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) / parts;
    const int slot = static_cast<int>(blockIdx.x) % parts * threads + static_cast<int>(threadIdx.x);
    const int window = p.cache.window;
    const int count = p.cache.counts[row].count;
    const int kept = p.keep == nullptr ? p.cache.pending : p.keep[row / p.cache.heads];
    const int token = slot - window;  // number of a pending key
    const bool exists = slot < count || (token >= 0 && token < kept);
    ScoredSlot key{nanf(""), 0};
    if (exists) key = load(p, row, slot);

    int better = 0;
    compare(p, shared, row, 0, count,
            [&](int, ScoredSlot other) { better += other.beats(key) ? 1 : 0; });
    std::int32_t evicted_by = better >= window ? 0 : stays;
    compare(p, shared, row, window, window + kept, [&](int other_slot, ScoredSlot other) {
      better += other.beats(key) ? 1 : 0;
      if (better >= window) evicted_by = min(evicted_by, other_slot - window);
    });
    if (slot < p.keys()) store(p, row, slot, !isnan(key.score), evicted_by);
  }

 private:
  static __device__ ScoredSlot load(const Params& p, std::int64_t row, int slot) {
    const std::int64_t at = p.cache.place(row, slot);
    return {p.cache.scores[at], p.cache.positions[at]};
  }

  // Calls body(slot, key) for the keys in slots [begin, end), in their order.
  template <class Body>
  static __device__ void compare(const Params& p, SharedStorage& shared, std::int64_t row,
                                 int begin, int end, const Body& body) {
    for (int first = begin; first < end; first += threads) {
      const int mine = first + static_cast<int>(threadIdx.x);
      __syncthreads();
      if (mine < end) shared.others[threadIdx.x] = load(p, row, mine);
      __syncthreads();
      const int size = min(end - first, threads);
#pragma unroll 8
      for (int i = 0; i < size; ++i) body(first + i, shared.others[i]);
    }
  }

  static __device__ void store(const Params& p, std::int64_t row, int slot, bool exists,
                               std::int32_t evicted_by) {
    const std::int64_t at = row * p.keys() + slot;
    if (p.evicted_by != nullptr) p.evicted_by[at] = exists ? evicted_by : -1;
    if (p.intervals == nullptr) return;
    const int first_query = p.cache.pending - p.seqlen_q;  // its number as a pending token
    const int first = max(slot - p.cache.window - first_query, 0);
    const int last = evicted_by == stays ? p.seqlen_q : evicted_by - first_query;
    p.intervals[at] = exists && first < last ? KeyInterval{first, last} : KeyInterval{0, 0};
  }
};

// Pending tokens that stay take first the slots of evicted keys and then free slots, both in ascending order. A block
// computes a (batch, kv head).
struct CommitKernel {
  struct Params {
    PendingParams pending;
    RowCopy copy;
    std::int32_t* places;  // [B, Hkv, pending] scratch, slots for the tokens
  };
  static constexpr int threads = 1024;
  static constexpr int min_blocks = 1;
  using Numbers = BlockNumbers<threads>;

  struct SharedStorage {
    typename Numbers::Storage numbers;
    typename WorstSlot<threads>::Storage worst;
  };

  static long blocks(const Params& p) {
    return static_cast<long>(p.pending.batch) * p.pending.cache.heads;
  }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const Slots& cache = p.pending.cache;
    const std::int64_t row = blockIdx.x;
    const int b = static_cast<int>(row / cache.heads);
    const int h = static_cast<int>(row % cache.heads);
    const int before = cache.counts[row].count;
    const std::int32_t* const evicted_by = p.pending.evicted_by + row * p.pending.keys();
    std::int32_t* const places = p.places + row * cache.pending;

    const int free = find_places(shared, evicted_by, before, cache, places);
    const int entered = move_tokens(p, shared, evicted_by, places, b, h);
    const int evicted = free - (cache.window - before);
    const int count = before - evicted + entered;
    __syncthreads();
    const std::int32_t victim = WorstSlot<threads>::find(shared.worst, cache, row, count);
    if (threadIdx.x > 0) return;
    cache.counts[row] = {count, victim};
    if (h == 0) cache.seen[b] += p.pending.keep == nullptr ? cache.pending : p.pending.keep[b];
  }

 private:
  // Finds the first slots that tokens may take, at most as many as are pending. Returns their number.
  static __device__ int find_places(SharedStorage& shared, const std::int32_t* evicted_by,
                                    int before, const Slots& cache, std::int32_t* places) {
    int found = 0;
    for (int begin = 0; begin < cache.window; begin += threads) {
      const int slot = begin + static_cast<int>(threadIdx.x);
      const bool is_free = slot < cache.window && (slot >= before || evicted_by[slot] != stays);
      int total;
      const int place = found + Numbers::number(shared.numbers, is_free, total);
      if (is_free && place < cache.pending) places[place] = slot;
      found += total;
    }
    __syncthreads();
    return found;
  }

  // Moves tokens to their slots. Returns their number.
  static __device__ int move_tokens(const Params& p, SharedStorage& shared,
                                    const std::int32_t* evicted_by, std::int32_t* places, int b,
                                    int h) {
    const Slots& cache = p.pending.cache;
    const std::int64_t row = cache.row(b, h);
    int entered = 0;
    for (int begin = 0; begin < cache.pending; begin += threads) {
      const int from = cache.window + begin + static_cast<int>(threadIdx.x);
      const bool enters = from < p.pending.keys() && evicted_by[from] == stays;
      int total;
      const int place = entered + Numbers::number(shared.numbers, enters, total);
      // Threads of a warp copy a row together.
      unsigned left = warp_ballot(enters);
      const std::int32_t to = enters ? places[place] : 0;
      if (enters) {
        cache.scores[cache.place(row, to)] = cache.scores[cache.place(row, from)];
        cache.positions[cache.place(row, to)] = cache.positions[cache.place(row, from)];
      }
      for (; left != 0; left &= left - 1) {
        const int lane = __ffs(static_cast<int>(left)) - 1;
        const int from_slot = shuffle(from, lane);
        const int to_slot = shuffle(to, lane);
        for (int i = lane_id(); i < p.copy.units; i += warp_size) {
          p.copy(cache.k.at(b, h, to_slot), cache.k.at(b, h, from_slot), i);
          p.copy(cache.v.at(b, h, to_slot), cache.v.at(b, h, from_slot), i);
        }
      }
      entered += total;
    }
    return entered;
  }
};

}  // namespace flash_dmattn::cuda::kv
