#pragma once

#include "cuda/kv_cache/slots.cuh"

namespace flash_dmattn::cuda::kv {

// Gives slots, in order, to the tokens of a prompt that its last token sees. The first of them are the sinks. A block
// computes a (batch, kv head).
struct FillSlotsKernel {
  struct Params {
    Slots cache;
    TokenScores scores;
    KeyIntervals intervals;
    const std::int32_t* lengths;  // may be null
    int seqlen_k;
    int seqlen_q;
    int batch;
  };
  static constexpr int threads = 1024;
  static constexpr int min_blocks = 1;
  static constexpr int thread_keys = 4;  // neighbouring keys
  static constexpr int step_keys = threads * thread_keys;
  using Numbers = BlockNumbers<threads>;
  using Sum = BlockSum<threads>;

  struct SharedStorage {
    typename BlockScan<threads>::Storage scan;
    typename Sum::Storage sum;
    typename Numbers::Storage numbers;
  };

  static long blocks(const Params& p) { return static_cast<long>(p.batch) * p.cache.heads; }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const int b = static_cast<int>(blockIdx.x) / p.cache.heads;
    const int h = static_cast<int>(blockIdx.x) % p.cache.heads;
    const int row = p.cache.rows(b);
    if (row < 0) return;
    const std::int64_t first_slot = p.cache.first(row, h);
    const int length = p.lengths == nullptr ? p.seqlen_k : min(max(p.lengths[b], 0), p.seqlen_k);
    const HeadRule rule = p.cache.rule.head_rule(h);
    const KeyInterval* const intervals =
        p.intervals.data + b * p.intervals.stride_batch + h * p.intervals.stride_head;
    int count = 0;
    int competed = 0;  // this and the next by this thread's keys
    int stored = 0;    // of those that have competed
    for (int begin = 0; begin < length; begin += step_keys) {
      const int first = begin + static_cast<int>(threadIdx.x) * thread_keys;
      bool is_present[thread_keys];
      bool survives[thread_keys];
      int survivors = 0;
#pragma unroll
      for (int i = 0; i < thread_keys; ++i) {
        is_present[i] = first + i < length && p.scores.is_present(b, first + i);
        survives[i] = false;
        if (!is_present[i]) continue;
        const KeyInterval seen = intervals[first + i];
        survives[i] = seen.first < seen.last && seen.last >= p.seqlen_q;
        survivors += survives[i] ? 1 : 0;
      }
      int total;
      int slot = count + Numbers::first_number(shared.numbers, survivors, total);
      count += total;
#pragma unroll
      for (int i = 0; i < thread_keys; ++i) {
        if (!is_present[i]) continue;
        const int key = first + i;
        const float score = p.scores(b, h, key);
        const bool is_admitted = !(survives[i] && slot < rule.sinks) && rule.admits(score);
        const bool competes = is_admitted && key < length - rule.delay();
        competed += competes ? 1 : 0;
        if (!survives[i]) continue;
        if (slot < rule.places) {
          const std::int64_t at = first_slot + slot;
          p.cache.scores[at] = score;
          p.cache.entries[at] = is_admitted ? key : ~key;
          stored += competes ? 1 : 0;
        }
        ++slot;
      }
    }
    count = min(count, rule.places);
    competed = Sum::of(shared.sum, competed);
    stored = Sum::of(shared.sum, stored);
    // If fewer than w keys are stored, they are all that have competed. The others of `competed` are masked keys, which a
    // call without a mask does not count.
    if (stored < rule.window) competed = stored;
    // Where recent keys compete, w better ones may have beaten some that stay visible.
    if (!rule.delayed && stored > rule.window)
      mark_beaten(p.cache, shared, rule.window, first_slot, count);
    const SlotScan scan =
        BlockScan<threads>::find(shared.scan, p.cache, rule, first_slot, count, length);
    if (threadIdx.x > 0) return;
    p.cache.count(row, h) = scan.count(count, competed);
    if (h == 0) p.cache.seen_of(row) = length;
  }

 private:
  // The order of keys as that of integers. Adding 0 makes -0 a +0.
  static __device__ std::uint64_t rank(float score, std::int32_t position) {
    const auto bits = static_cast<std::uint32_t>(__float_as_int(score + 0.0f));
    const std::uint32_t ordered = bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
    return std::uint64_t{ordered} << 32 | static_cast<std::uint32_t>(position);
  }

  // Calls body(at, rank) for the keys of this thread that compete.
  template <class Body>
  static __device__ void for_competing(const Slots& cache, std::int64_t first, int count,
                                       const Body& body) {
    for (int slot = static_cast<int>(threadIdx.x); slot < count; slot += threads) {
      const std::int64_t at = first + slot;
      const std::int32_t entry = cache.entries[at];
      if (entry >= 0) body(at, rank(cache.scores[at], entry));
    }
  }

  // Marks the keys that w better ones beat. The largest rank that w keys reach is found bit by bit.
  static __device__ void mark_beaten(const Slots& cache, SharedStorage& shared, int window,
                                     std::int64_t first, int count) {
    std::uint64_t least = 0;
    for (std::uint64_t bit = std::uint64_t{1} << 63; bit != 0; bit >>= 1) {
      int reaching = 0;
      for_competing(cache, first, count, [&](std::int64_t, std::uint64_t rank) {
        reaching += rank >= (least | bit) ? 1 : 0;
      });
      if (Sum::of(shared.sum, reaching) >= window) least |= bit;
    }
    for_competing(cache, first, count, [&](std::int64_t at, std::uint64_t rank) {
      if (rank < least) cache.entries[at] = ~cache.entries[at];
    });
    __syncthreads();
  }
};

}  // namespace flash_dmattn::cuda::kv
