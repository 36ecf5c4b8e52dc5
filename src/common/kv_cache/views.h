#pragma once

#include <cstdint>

#include "common/kv_cache/head_slots.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/kv_cache.h"

namespace flash_dmattn {

// The row of the arrays for row b of a call; negative: none.
inline std::int64_t row_of(const KvCache& cache, std::int64_t b) {
  return cache.rows.index == nullptr ? b : cache.rows.index[b * cache.rows.index_stride];
}

inline std::int32_t& seen_of(const KvCache& cache, std::int64_t row) {
  return cache.seen[row * cache.rows.seen_stride];
}

// The number of tokens that fill brings to row b of a call, and of pending tokens that count.
inline std::int32_t length_of(const FillArgs& args, std::int64_t b) {
  return args.lengths == nullptr ? static_cast<std::int32_t>(args.seqlen_k) : args.lengths[b];
}
template <class Args>
std::int32_t kept_of(const Args& args, std::int64_t b) {
  return args.kept_tokens == nullptr ? static_cast<std::int32_t>(args.cache.pending)
                                     : args.kept_tokens[b];
}

// Where PendingIntervalsCall stores the intervals of a head.
struct HeadIntervals {
  std::int64_t row;    // the number of intervals of all heads
  std::int64_t first;  // in a row
  std::int64_t count;
  std::int64_t queries_before;  // of the heads before

  HeadIntervals(const PendingIntervalsArgs& args, std::int64_t h) {
    const KvCacheShape& s = args.cache.shape;
    const HeadSlots slots = head_slots(s, h);
    const bool equal = s.has_equal_heads();
    count = slots.places + (equal ? args.cache.pending : s.chunk);
    row = equal ? s.heads_kv * count : s.total_slots();
    first = equal ? h * count : slots.first;
    queries_before = equal ? 0 : h * args.seqlen_q;
  }
};

// Views slots [B, Hkv, slots, D] as [B, slots, Hkv, D], as attention reads its keys.
inline Tensor4 by_token(const Tensor4& slots) {
  const auto& [batch, head, slot, element] = slots.stride;
  return {slots.data, {batch, slot, head, element}};
}

// The attention of seqlen_q queries of each kv head to the first `keys` slots of this head. If heads have different
// numbers of slots, the keys of head h begin HeadSlots::rows_before rows after those of head 0.
inline Problem problem_of_slots(const KvCacheShape& s, std::int64_t heads_q, std::int64_t seqlen_q,
                                std::int64_t keys, double scale, ScoreUse use) {
  Problem problem{.batch = s.batch,
                  .heads_q = heads_q,
                  .heads_kv = s.heads_kv,
                  .seqlen_q = seqlen_q,
                  .seqlen_k = keys,
                  .head_dim = s.head_dim,
                  .value_dim = s.value_dim,
                  .dtype = s.dtype,
                  .device = s.device,
                  .scale = scale};
  if (use == ScoreUse::choose_and_bias) {
    problem.bias_shape = {s.batch, s.heads_kv, 1, keys};
    problem.bias_dtype = DType::f32;
  }
  return problem;
}

inline Inputs inputs_of_slots(const KvCache& cache, const ConstTensor4& q, ScoreUse use) {
  const KvCacheShape& s = cache.shape;
  Inputs in{.q = q, .k = by_token(cache.k), .v = by_token(cache.v)};
  if (use == ScoreUse::choose_and_bias) {
    const std::int64_t row = cache.rows.slot_stride;
    in.bias = {cache.scores,
               {row == dense_stride ? s.total_slots() : row,
                s.has_equal_heads() && s.heads_kv > 0 ? s.slots(0) : 0, 0, 1}};
  }
  return in;
}

// The attention of a decode step.
inline Problem step_problem(const DecodeStepArgs& args) {
  const KvCacheShape& s = args.cache.shape;
  Problem problem =
      problem_of_slots(s, args.heads_q, 1, s.most_places(), args.scale, args.score_use);
  problem.softcap = args.softcap;
  problem.nonfinite = args.nonfinite;
  return problem;
}

}  // namespace flash_dmattn
