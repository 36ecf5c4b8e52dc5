#pragma once

#include <functional>

#include "cuda/kv_cache/slots.cuh"
#include "cuda/primitives/integers.h"

// Finds the intervals of pending tokens under a rule, and the keys that stay when they are committed.
//
// A key is evicted by the first token after which w better keys compete. The number of keys that beat it only grows, so
// each key can be compared with all others in any order. Rows are dense, numbered by (batch, kv head).
namespace flash_dmattn::cuda::kv {

inline constexpr std::int32_t never = 0x7fffffff;

// The fate of a key that pending tokens follow.
enum class Fate : std::uint8_t {
  gone,
  stays,
  stops_competing,  // and stays
};

struct PendingParams {
  Slots cache;
  int batch;
  int more_outputs;                 // slots of a head with outputs, less its places
  int most_keys;                    // of a head with its outputs
  const std::int32_t* kept_tokens;  // [B] number of pending tokens that count; null for all
  int seqlen_q;                     // number of queries of the intervals
  // Workspace, if keys compete with a delay: [B, Hkv, pending] the slot of the key that begins to compete with each
  // token, -1 for none. Null: the token's own key begins to compete.
  std::int32_t* arrivals = nullptr;
  // Outputs for [B, Hkv, places + pending] slots, or for all slots [B, total] if heads have different numbers of them. One
  // is set: `fates`, `gone` for an empty slot, together with `seen_before` [B, Hkv], or `intervals`, the queries that see
  // each key.
  Fate* fates = nullptr;
  std::int32_t* seen_before = nullptr;
  KeyInterval* intervals = nullptr;

  __device__ int head_of(std::int64_t row) const { return static_cast<int>(row % cache.heads); }
  __device__ int places(std::int64_t row) const { return cache.places(head_of(row)); }
  __device__ int keys(std::int64_t row) const { return places(row) + cache.pending; }
  // The end of the slots with outputs.
  __device__ int end_of(std::int64_t row) const { return places(row) + more_outputs; }
  __device__ std::int64_t place(std::int64_t row, int slot) const {
    return cache.rule.first_in_rows(row, cache.heads) + slot;
  }
  // The output of a slot.
  __device__ std::int64_t output(std::int64_t row, int slot) const {
    return cache.rule.by_head ? place(row, slot) : row * end_of(row) + slot;
  }
  __device__ int kept(std::int64_t row) const {
    if (kept_tokens == nullptr) return cache.pending;
    return min(max(kept_tokens[row / cache.heads], 0), cache.pending);
  }
  __device__ int taken(std::int64_t row) const {
    return taken_slots(rule_of(row), cache.counts[row]);
  }
  __device__ HeadRule rule_of(std::int64_t row) const { return cache.rule.head_rule(head_of(row)); }
  __device__ std::int32_t entry(std::int64_t row, int slot) const {
    return cache.entries[place(row, slot)];
  }
  // The slot of the key that begins to compete with a token, or -1. The first sink_end tokens are sinks.
  __device__ int arrival(std::int64_t row, int token, int sink_end) const {
    if (arrivals != nullptr) return arrivals[row * cache.pending + token];
    const int slot = places(row) + token;
    return token >= sink_end && entry(row, slot) >= 0 ? slot : -1;
  }
};

// Finds the number of the first pending tokens of a row that are sinks: until there are enough of them, all keys are.
// Contains barriers.
template <int Threads>
struct PendingSinks {
  using Numbers = BlockNumbers<Threads>;
  struct Storage {
    typename Numbers::Storage numbers;
    int end;
  };

  static __device__ int find(Storage& storage, const PendingParams& p, std::int64_t row) {
    const Slots& cache = p.cache;
    int missing = cache.rule.common.sinks - p.taken(row);
    if (missing <= 0) return 0;
    if (threadIdx.x == 0) storage.end = cache.pending;
    __syncthreads();
    for (int begin = 0; begin < cache.pending && missing > 0; begin += Threads) {
      const int token = begin + static_cast<int>(threadIdx.x);
      const bool is_key = token < cache.pending && p.entry(row, p.places(row) + token) != no_key;
      int found;
      const int number = Numbers::number(storage.numbers, is_key, found);
      if (is_key && number == missing - 1) storage.end = token + 1;
      missing -= found;
    }
    __syncthreads();
    return storage.end;
  }
};

// Finds the keys that begin to compete with each pending token. A block computes a (batch, kv head).
struct FindArrivalsKernel {
  using Params = PendingParams;
  static constexpr int threads = 1024;
  static constexpr int min_blocks = 1;
  using SharedStorage = typename PendingSinks<threads>::Storage;

  static long blocks(const Params& p) { return static_cast<long>(p.batch) * p.cache.heads; }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const Slots& cache = p.cache;
    const std::int64_t row = blockIdx.x;
    const int count = p.taken(row);
    const int sink_end = PendingSinks<threads>::find(shared, p, row);
    std::int32_t* const arrivals = p.arrivals + row * cache.pending;
    for (int i = static_cast<int>(threadIdx.x); i < cache.pending; i += threads) arrivals[i] = -1;
    __syncthreads();
    // The token with which a key at position 0 would begin to compete.
    const int first = cache.rule.common.delay() - cache.seen[row / cache.heads];
    for (int slot = static_cast<int>(threadIdx.x); slot < p.keys(row); slot += threads) {
      const int pending = slot - p.places(row);
      if (pending < 0 ? slot >= count : pending < sink_end) continue;
      const std::int32_t entry = p.entry(row, slot);
      if (entry < 0) continue;  // such a key never competes, and its entry may be as low as -2^31
      const int token = entry + first;
      if (token >= 0 && token < cache.pending) arrivals[token] = slot;
    }
  }
};

// A thread computes a key. Between equal scores the more recent key is better. Positions ascend with the tokens at
// which keys begin to compete, so whether one of these is more recent follows from its number.
struct FindFatesKernel {
  using Params = PendingParams;
  static constexpr int threads = 256;
  static constexpr int min_blocks = 5;  // 48 registers
  static constexpr int together = 32;   // others whose comparisons are bits of an integer

  struct SharedStorage {
    alignas(16) float scores[threads];
    std::int32_t positions[threads];
    typename PendingSinks<threads>::Storage sinks;
  };

  static long blocks(const Params& p) {
    return static_cast<long>(p.batch) * p.cache.heads * ceil_div(p.most_keys, threads);
  }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const Slots& cache = p.cache;
    const int parts = ceil_div(p.most_keys, threads);
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) / parts;
    const int slot = static_cast<int>(blockIdx.x) % parts * threads + static_cast<int>(threadIdx.x);
    const std::int32_t seen = cache.seen[row / cache.heads];
    if (p.fates != nullptr && slot == 0) p.seen_before[row] = seen;
    const int end_slot = p.end_of(row);
    if (slot - static_cast<int>(threadIdx.x) >= end_slot) return;
    const HeadRule rule = p.rule_of(row);
    const int count = p.taken(row);
    const int kept = p.kept(row);
    const int sink_end = PendingSinks<threads>::find(shared.sinks, p, row);
    const int token = slot - rule.places;  // number of a pending key
    const bool is_taken = slot < count || (token >= 0 && token < kept);
    const std::int32_t entry = is_taken ? p.entry(row, slot) : no_key;
    const float score = entry >= 0 ? cache.scores[p.place(row, slot)] : nanf("");

    int better = 0;
    for (int first = 0; first < count; first += threads) {
      const int other = first + static_cast<int>(threadIdx.x);
      const std::int32_t position = other < count ? p.entry(row, other) : no_key;
      const bool competes = 0 <= position && position < seen - rule.delay();
      __syncthreads();
      shared.scores[threadIdx.x] = competes ? cache.scores[p.place(row, other)] : nanf("");
      shared.positions[threadIdx.x] = position;
      __syncthreads();
      const int size = min(count - first, threads);
      for (int i = 0; i < size; i += together) {
        better += __popc(warp_all(token >= 0) ? comparisons(shared, i, std::greater(), score)
                                              : comparisons(shared, i, score, entry));
      }
    }
    std::int32_t beaten_by = better >= rule.window ? 0 : never;
    // This key's number among those that begin to compete with pending tokens; later ones are more recent.
    const std::int32_t own = entry >= 0 ? entry - seen + rule.delay() : token;
    for (int first = 0; first < kept; first += threads) {
      const int mine = first + static_cast<int>(threadIdx.x);
      const int other = mine < kept ? p.arrival(row, mine, sink_end) : -1;
      __syncthreads();
      shared.scores[threadIdx.x] = other < 0 ? nanf("") : cache.scores[p.place(row, other)];
      shared.positions[threadIdx.x] = mine;
      __syncthreads();
      const int size = min(kept - first, threads);
      for (int i = 0; i < size; i += together) {
        const unsigned beats = warp_all(own < first + i)
                                   ? comparisons(shared, i, std::greater_equal(), score)
                               : warp_all(own >= first + i + together - 1)
                                   ? comparisons(shared, i, std::greater(), score)
                                   : comparisons(shared, i, score, own);
        const int more = __popc(beats);
        if (better < rule.window && better + more >= rule.window)
          beaten_by = first + i + nth_bit(beats, rule.window - better);
        better += more;
      }
    }
    if (slot >= end_slot) return;
    const bool is_sink = token < 0 ? slot < rule.sinks : token < sink_end;
    std::int32_t end = -1;
    if (entry != no_key) {
      const std::int32_t recent_end = position_of_entry(entry) - seen + rule.recent;
      end = is_sink ? never : entry < 0 ? recent_end : max(recent_end, beaten_by);
    }
    const bool is_unchosen = is_sink || (!rule.delayed && beaten_by < kept);
    store(p, row, slot, token, end, entry >= 0 && is_unchosen, kept);
  }

 private:
  // Bit i: whether other `begin` + i beats the key. A NaN beats no key, and no key a NaN.
  template <class Compare>
  static __device__ unsigned comparisons(const SharedStorage& shared, int begin,
                                         const Compare& beats, float score) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < together; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&shared.scores[begin + i]);
      bits |= beats(four.x, score) ? 1u << i : 0;
      bits |= beats(four.y, score) ? 2u << i : 0;
      bits |= beats(four.z, score) ? 4u << i : 0;
      bits |= beats(four.w, score) ? 8u << i : 0;
    }
    return bits;
  }
  // Which of the others beat a score where some are more recent: those with a larger position.
  static __device__ unsigned comparisons(const SharedStorage& shared, int begin, float score,
                                         std::int32_t position) {
    unsigned bits = 0;
#pragma unroll 8
    for (int i = 0; i < together; ++i) {
      const float other = shared.scores[begin + i];
      const bool is_newer = shared.positions[begin + i] > position;
      bits |= other > score || (other == score && is_newer) ? 1u << i : 0;
    }
    return bits;
  }

  // The place of the n-th bit that is set, n from 1.
  static __device__ int nth_bit(unsigned bits, int n) {
    for (; n > 1; --n) bits &= bits - 1;
    return __ffs(static_cast<int>(bits)) - 1;
  }

  // `end`: the pending token that is the first to see the key no longer; -1 without a key.
  static __device__ void store(const Params& p, std::int64_t row, int slot, int token,
                               std::int32_t end, bool is_unchosen, int kept) {
    const std::int64_t at = p.output(row, slot);
    if (p.fates != nullptr) {
      p.fates[at] = end < kept || end < 0 ? Fate::gone
                    : is_unchosen         ? Fate::stops_competing
                                          : Fate::stays;
    }
    if (p.intervals == nullptr) return;
    const int first_query = p.cache.pending - p.seqlen_q;  // its number as a pending token
    const int first = max(token - first_query, 0);
    const int last = min(end, kept) - first_query;
    const int before = p.cache.rule.by_head ? p.head_of(row) * p.seqlen_q : 0;
    p.intervals[at] = first < last ? KeyInterval{before + first, before + last} : KeyInterval{0, 0};
  }
};

// Pending tokens that stay take the first slots without a key, in order; MoveTokens copies their rows. A block computes a
// (batch, kv head).
struct CommitKernel {
  struct Params {
    PendingParams pending;
    std::int32_t* places;        // [B, Hkv, pending] scratch, slots for the tokens
    std::int32_t* destinations;  // [B, Hkv, pending] the slot of each token, -1 if it has none
  };
  static constexpr int threads = 1024;
  static constexpr int min_blocks = 1;
  using Numbers = BlockNumbers<threads>;
  using Sum = BlockSum<threads>;

  struct SharedStorage {
    typename Numbers::Storage numbers;
    typename Sum::Storage sum;
    typename BlockScan<threads>::Storage scan;
    typename PendingSinks<threads>::Storage sinks;
  };

  static long blocks(const Params& p) {
    return static_cast<long>(p.pending.batch) * p.pending.cache.heads;
  }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const PendingParams& pending = p.pending;
    const Slots& cache = pending.cache;
    const std::int64_t row = blockIdx.x;
    const int b = static_cast<int>(row / cache.heads);
    const int h = pending.head_of(row);
    const int before = pending.taken(row);
    const int competed_before = cache.counts[row].competed;
    const int kept = pending.kept(row);
    const std::int32_t seen = pending.seen_before[row];
    const int sink_end = PendingSinks<threads>::find(shared.sinks, pending, row);
    const Fate* const fates = pending.fates + pending.output(row, 0);
    std::int32_t* const places = p.places + row * cache.pending;
    std::int32_t* const destinations = p.destinations + row * cache.pending;

    for (int slot = static_cast<int>(threadIdx.x); slot < before; slot += threads) {
      std::int32_t& entry = cache.entries[pending.place(row, slot)];
      entry = entry_after(entry, fates[slot]);
    }
    const int found =
        find_places(shared, fates, before, pending.places(row), cache.pending, places);
    const int entered = move_tokens(pending, shared, fates, places, found, destinations, row);
    const int count = entered == 0 ? before : max(before, places[entered - 1] + 1);
    int competed = 0;
    for (int i = static_cast<int>(threadIdx.x); i < kept; i += threads) {
      competed += pending.arrival(row, i, sink_end) < 0 ? 0 : 1;
    }
    competed = competed_before + Sum::of(shared.sum, competed);
    const SlotScan scan = BlockScan<threads>::find(shared.scan, cache, pending.rule_of(row),
                                                   pending.place(row, 0), count, seen + kept);
    if (threadIdx.x > 0) return;
    cache.counts[row] = scan.count(count, competed);
    if (h == 0) cache.seen[b] = seen + kept;
  }

 private:
  static __device__ std::int32_t entry_after(std::int32_t entry, Fate fate) {
    return fate == Fate::gone ? no_key : fate == Fate::stops_competing ? ~entry : entry;
  }

  // Finds the first slots without a key, at most as many as tokens are pending. Returns their number.
  static __device__ int find_places(SharedStorage& shared, const Fate* fates, int before,
                                    int head_places, int pending, std::int32_t* places) {
    int found = 0;
    for (int begin = 0; begin < head_places && found < pending; begin += threads) {
      const int slot = begin + static_cast<int>(threadIdx.x);
      const bool is_free = slot < head_places && (slot >= before || fates[slot] == Fate::gone);
      int total;
      const int place = found + Numbers::number(shared.numbers, is_free, total);
      if (is_free && place < pending) places[place] = slot;
      found += total;
    }
    __syncthreads();
    return min(found, pending);
  }

  // Moves scores and entries of tokens to their slots. Returns the number of these tokens. There is a slot for each of
  // them unless the row's counts or entries are invalid.
  static __device__ int move_tokens(const PendingParams& p, SharedStorage& shared,
                                    const Fate* fates, const std::int32_t* places, int found,
                                    std::int32_t* destinations, std::int64_t row) {
    const Slots& cache = p.cache;
    const std::int64_t first = p.place(row, 0);
    int entered = 0;
    for (int begin = 0; begin < cache.pending; begin += threads) {
      const int token = begin + static_cast<int>(threadIdx.x);
      const int from = p.places(row) + token;
      const bool enters = token < cache.pending && fates[from] != Fate::gone;
      int total;
      const int place = entered + Numbers::number(shared.numbers, enters, total);
      const bool has_place = enters && place < found;
      if (has_place) {
        const std::int32_t to = places[place];
        cache.scores[first + to] = cache.scores[first + from];
        cache.entries[first + to] = entry_after(cache.entries[first + from], fates[from]);
      }
      if (token < cache.pending) destinations[token] = has_place ? places[place] : -1;
      entered += total;
    }
    __syncthreads();
    return min(entered, found);
  }
};

}  // namespace flash_dmattn::cuda::kv
