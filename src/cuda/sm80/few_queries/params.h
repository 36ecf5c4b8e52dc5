#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/slot_scan.cuh"
#include "cuda/sm80/few_queries/choice.h"
#include "flash_dmattn/kv_cache.h"

namespace flash_dmattn::cuda::sm80::few_queries {

// The result of a row over some of its keys: the maximum of the scores in units of log 2 (or the value by which weights
// are scaled instead), the sum of the weights, and the reference that the scores lack (OnlineSoftmax).
struct alignas(16) RowSums {
  float max;
  float sum;
  float reference;
};

struct Params : ForwardParams {
  Params() = default;
  explicit Params(const ForwardParams& forward) : ForwardParams(forward) {}

  Split split;
  // The sums of each block over its keys, unless a cluster adds them: [B, Hq, Sq, splits] and [B, Hq, Sq, splits, D],
  // where D is the bucket.
  RowSums* sums = nullptr;
  float* outs = nullptr;
};

// A decode step, whose keys are the slots of a KV cache. The new token enters a slot before its query attends.
struct StepParams : Params {
  StepParams() = default;
  explicit StepParams(const ForwardParams& forward) : Params(forward) {}

  // The cache; k and v of Params are its slots.
  float* scores = nullptr;
  std::int32_t* positions = nullptr;
  SlotCount* counts = nullptr;
  std::int32_t* seen = nullptr;
  RowIndex rows;
  OutputRows k_slots, v_slots;
  CacheRule rule;
  HeadBlocks head_blocks;  // if rule.by_head

  // The blocks that share the slots of a head, unless they are a cluster.
  __device__ int splits_of(int kv_head) const {
    if (!rule.by_head) return split.splits;
    const int place = head_blocks.place[kv_head];
    return head_blocks.first[place + 1] - head_blocks.first[place];
  }
  // The first slot of a head, in `scores` and `positions`, and its count.
  __device__ std::int64_t first_slot(int row, int kv_head) const {
    return row * rows.slot_stride + rule[kv_head].first;
  }
  __device__ SlotCount& count(int row, int kv_head) const {
    return counts[row * rows.count_stride + kv_head];
  }

  // The token.
  InputRows new_k, new_v;
  ScoreRows new_scores;
  TokenMask mask;

  // Workspace, unless a cluster has the rows of a kv head: [B, Hkv, splits] what each block finds in its slots, and
  // [B, Hkv] count and competed of SlotCount after the step.
  SlotScan* scans = nullptr;
  int2* counts_after = nullptr;
};

}  // namespace flash_dmattn::cuda::sm80::few_queries
