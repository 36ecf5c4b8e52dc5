#pragma once

#include "cuda/kv_cache/slots.cuh"

namespace flash_dmattn::cuda::kv {

// Gives slots, in order, to the tokens of a prompt that later queries see. A block computes a (batch, kv head).
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

  struct SharedStorage {
    typename WorstSlot<threads>::Storage worst;
    int counts[threads / warp_size];
  };

  static long blocks(const Params& p) { return static_cast<long>(p.batch) * p.cache.heads; }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const int b = static_cast<int>(blockIdx.x) / p.cache.heads;
    const int h = static_cast<int>(blockIdx.x) % p.cache.heads;
    const std::int64_t row = blockIdx.x;
    const int length = p.lengths == nullptr ? p.seqlen_k : p.lengths[b];
    const KeyInterval* const intervals =
        p.intervals.data + b * p.intervals.stride_batch + h * p.intervals.stride_head;
    int count = 0;
    for (int begin = 0; begin < length; begin += step_keys) {
      const int first = begin + static_cast<int>(threadIdx.x) * thread_keys;
      float score[thread_keys];
      int survivors = 0;
#pragma unroll
      for (int i = 0; i < thread_keys; ++i) {
        score[i] = nanf("");
        if (first + i >= length) continue;
        const KeyInterval seen = intervals[first + i];
        if (seen.first < seen.last && seen.last >= p.seqlen_q) score[i] = p.scores(b, h, first + i);
        survivors += isnan(score[i]) ? 0 : 1;
      }
      const int through = warp_inclusive_sum(survivors, lane_id());
      if (lane_id() == warp_size - 1) shared.counts[warp_id()] = through;
      __syncthreads();
      int slot = count + through - survivors;
      for (int w = 0; w < threads / warp_size; ++w) {
        if (w < warp_id()) slot += shared.counts[w];
        count += shared.counts[w];
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < thread_keys; ++i) {
        if (isnan(score[i])) continue;
        if (slot < p.cache.window) {
          const std::int64_t at = p.cache.place(row, slot);
          p.cache.scores[at] = score[i];
          p.cache.positions[at] = first + i;
        }
        ++slot;
      }
    }
    count = min(count, p.cache.window);
    __syncthreads();
    const std::int32_t victim = WorstSlot<threads>::find(shared.worst, p.cache, row, count);
    if (threadIdx.x > 0) return;
    p.cache.counts[row] = {count, victim};
    if (h == 0) p.cache.seen[b] = length;
  }
};

}  // namespace flash_dmattn::cuda::kv
