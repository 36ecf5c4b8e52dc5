#pragma once

#include <algorithm>

#include "cuda/attention/query_head.h"
#include "cuda/attention/score.cuh"
#include "cuda/sm90/key_info.h"

namespace flash_dmattn::cuda::sm90 {

// The queries [first, last) that see a key by position and interval; none past the last key.
__device__ inline KeyInterval key_range(const Shape& shape, const ScoreParams& score, int batch,
                                        int kv_head, int key) {
  if (key >= shape.seqlen_k) return {0, 0};
  KeyInterval seen{0, shape.seqlen_q};
  if (score.intervals.data != nullptr) {
    seen = score.intervals.data[batch * score.intervals.stride_batch +
                                kv_head * score.intervals.stride_head + key];
  }
  if (score.causal) seen.first = max(seen.first, key - (shape.seqlen_k - shape.seqlen_q));
  return {min(max(seen.first, 0), shape.seqlen_q), min(max(seen.last, 0), shape.seqlen_q)};
}

// Whether the mask of keys shows a key, which exists.
__device__ inline bool is_shown(const ScoreParams& score, const QueryHead& head, int key) {
  if (score.mask.data == nullptr || score.mask.dense) return true;
  return reinterpret_cast<const std::uint8_t*>(score.mask.data)[head.element(score.mask, 0, key)] !=
         0;
}

// The bias of a key times `factor`, -inf where mask or bias hide the key, and 0 past the last key. `factor` is 1, or converts
// to the unit of accumulators. `masked_bias` replaces a bias that hides the key.
template <class T>
__device__ inline float key_bias(const Shape& shape, const ScoreParams& score,
                                 const QueryHead& head, int key, float factor,
                                 float masked_bias = negative_infinity) {
  if (key >= shape.seqlen_k) return 0;
  if (!is_shown(score, head, key)) return negative_infinity;
  if (score.bias.data == nullptr || score.bias.dense) return 0;
  const float value = load_bias<T>(score.bias, head.element(score.bias, 0, key));
  return value > score.mask_value ? value * factor : masked_bias;
}

// Computes KeyInfo, with one thread for each range and bias.
template <class T>
struct PrepareKeyInfo {
  Shape shape;
  ScoreParams score;
  KeyInfo info;
  float bias_factor;
  // The bias of a key that a delayed bias hides from the queries for which it counts.
  float masked_bias = negative_infinity;

  __host__ __device__ long ranges() const {
    return info.ranges == nullptr ? 0 : long{info.padded_keys} * info.batch * info.range_heads;
  }
  __host__ __device__ long biases() const {
    return info.biases == nullptr ? 0 : long{info.padded_keys} * info.batch * info.bias_heads;
  }
  long items() const { return std::max(ranges(), biases()); }

  __device__ void operator()(long i) const {
    if (i < ranges()) {
      const Place at = place(i, info.range_heads);
      info.ranges[i] = key_range(shape, score, at.head.batch, at.head.kv_head, at.key);
    }
    if (i >= biases()) return;
    const Place at = place(i, info.bias_heads);
    info.biases[i] = key_bias<T>(shape, score, at.head, at.key, bias_factor, masked_bias);
    if (info.caller_biases != 0)
      info.biases[i + info.caller_biases] = key_bias<T>(shape, score, at.head, at.key, 1);
    if (info.recent == 0) return;
    const bool hidden = at.key < shape.seqlen_k && !is_shown(score, at.head, at.key);
    info.biases[i + info.recent] = hidden ? negative_infinity : 0;
  }

 private:
  struct Place {
    QueryHead head;
    int key;  // from seqlen_k on, padding
  };

  // `heads` are key heads, or query heads if the mask or the bias has query heads.
  __device__ Place place(long i, int heads) const {
    const long row = i / info.padded_keys;
    const auto batch = static_cast<int>(row / heads);
    const auto head = static_cast<int>(row % heads);
    const int kv_head = heads == shape.heads_q ? head / shape.group_heads() : head;
    return {{batch, head, kv_head}, static_cast<int>(i % info.padded_keys)};
  }
};

}  // namespace flash_dmattn::cuda::sm90
