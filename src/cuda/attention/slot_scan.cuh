#pragma once

#include <climits>

#include "common/kv_cache/head_slots.h"
#include "cuda/primitives/math.cuh"
#include "cuda/primitives/warp.cuh"

// Collects victim, free slot and leaving key for the next step of a KV cache while its slots are read.
namespace flash_dmattn::cuda {

// The rows of a cache in its arrays (CacheRows).
struct RowIndex {
  const std::int32_t* index = nullptr;  // null: row b is row b
  std::int64_t index_stride = 1;
  std::int64_t count = 0;
  std::int64_t slot_stride = 0;
  std::int64_t count_stride = 0;
  std::int64_t seen_stride = 0;

  RowIndex() = default;
  explicit RowIndex(const CacheRows& rows)
      : index(rows.index),
        index_stride(rows.index_stride),
        count(rows.count),
        slot_stride(rows.slot_stride),
        count_stride(rows.count_stride),
        seen_stride(rows.seen_stride) {}

  // The row of the arrays for row b of the call, or -1.
  __device__ int operator()(int b) const {
    if (index == nullptr) return b;
    const std::int32_t row = __ldg(index + b * index_stride);
    return 0 <= row && row < count ? row : -1;
  }
};

// The victim, the first slot without a key, and the leaving key (the oldest recent one), among some slots of a head.
struct SlotScan {
  float victim_score;
  std::int32_t victim_position;
  std::int32_t victim;
  std::int32_t free;     // INT_MAX: every slot has a key
  std::int32_t leaving;  // -1: no such key
  float leaving_score;

  // The positions that matter after `tokens` tokens of the row.
  struct ScanPositions {
    std::int32_t sinks;
    std::int32_t end;      // keys compete at the positions before it
    std::int32_t leaving;  // the position of the oldest recent key, negative if there is none

    __device__ ScanPositions(const HeadRule& rule, std::int32_t tokens)
        : sinks(rule.sinks),
          end(tokens - rule.delay()),
          leaving(rule.recent > 0 ? tokens - rule.recent : -1) {}
  };

  static __device__ SlotScan nothing() { return {-negative_infinity, INT_MAX, 0, INT_MAX, -1, 0}; }

  __device__ void add(const ScanPositions& positions, float score, std::int32_t entry,
                      std::int32_t slot) {
    if (entry == no_key) {
      free = min(free, slot);
      return;
    }
    if (0 <= entry && entry < positions.end) offer(score, entry, slot);
    if (position_of_entry(entry) == positions.leaving && slot >= positions.sinks) {
      leaving = slot;
      leaving_score = entry < 0 ? nanf("") : score;
    }
  }

  __device__ void add(const SlotScan& other) {
    offer(other.victim_score, other.victim_position, other.victim);
    free = min(free, other.free);
    if (other.leaving >= 0) {
      leaving = other.leaving;
      leaving_score = other.leaving_score;
    }
  }

  // The sum over a warp, in every lane.
  __device__ SlotScan warp_sum() const {
    SlotScan sum = *this;
#pragma unroll
    for (int step = 1; step < warp_size; step *= 2) {
      sum.offer(shuffle_xor(sum.victim_score, step), shuffle_xor(sum.victim_position, step),
                shuffle_xor(sum.victim, step));
    }
    sum.free = warp_min(free);
    const unsigned found = warp_ballot(leaving >= 0);
    const int lane = max(__ffs(static_cast<int>(found)) - 1, 0);
    sum.leaving = shuffle(leaving, lane);
    sum.leaving_score = shuffle(leaving_score, lane);
    return sum;
  }

  __device__ SlotCount count(std::int32_t taken, std::int32_t competed) const {
    return {.count = taken,
            .competed = competed,
            .free = min(free, taken),
            .leaving = leaving,
            .leaving_score = leaving_score,
            .victim = victim,
            .victim_score = victim_score,
            .victim_position = victim_position};
  }

 private:
  // A key is worse if its score is lower, or if it is older and has the same score.
  __device__ void offer(float score, std::int32_t position, std::int32_t slot) {
    if (score < victim_score || (score == victim_score && position < victim_position)) {
      victim_score = score;
      victim_position = position;
      victim = slot;
    }
  }
};

}  // namespace flash_dmattn::cuda
