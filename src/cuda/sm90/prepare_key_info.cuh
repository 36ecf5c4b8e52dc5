#pragma once

#include <algorithm>

#include "cuda/attention/score.cuh"
#include "cuda/sm90/key_info.h"

namespace flash_dmattn::cuda::sm90 {

// Computes KeyInfo, with one thread for each range and bias. A bias is in units of the accumulator that it initializes,
// that is, divided by the scale, or in units of log 2 if it is added after the scores are shaped.
template <class T>
struct PrepareKeyInfo {
  Shape shape;
  ScoreParams score;
  KeyInfo info;
  float bias_factor;
  ListedKeys list = {};
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
    if (i < ranges()) info.ranges[i] = range(place(i, info.range_heads));
    if (i >= biases()) return;
    const Place at = place(i, info.bias_heads);
    info.biases[i] = bias(at);
    if (info.recent != 0) info.biases[i + info.recent] = is_shown(at) ? 0 : negative_infinity;
  }

 private:
  struct Place {
    int batch;
    int head;
    int key;  // seqlen_k past the last key
  };

  __device__ Place place(long i, int heads) const {
    const long row = i / info.padded_keys;
    const auto batch = static_cast<int>(row / heads);
    const auto head = static_cast<int>(row % heads);
    const int kv_head = heads == shape.heads_q ? head / (shape.heads_q / shape.heads_kv) : head;
    const int key = list.key(batch, kv_head, static_cast<int>(i % info.padded_keys));
    return {batch, head, key < 0 ? shape.seqlen_k : key};
  }

  __device__ KeyInterval range(const Place& at) const {
    if (at.key >= shape.seqlen_k) return {0, 0};
    KeyInterval seen{0, shape.seqlen_q};
    if (score.intervals.data != nullptr) {
      seen = score.intervals.data[at.batch * score.intervals.stride_batch +
                                  at.head * score.intervals.stride_head + at.key];
    }
    if (score.causal) seen.first = max(seen.first, at.key - (shape.seqlen_k - shape.seqlen_q));
    return {min(max(seen.first, 0), shape.seqlen_q), min(max(seen.last, 0), shape.seqlen_q)};
  }

  __device__ std::int64_t index(const Broadcast& b, const Place& at) const {
    // Heads are query heads if the mask or the bias has query heads.
    const int group = info.bias_heads == shape.heads_q ? shape.heads_q / shape.heads_kv : 1;
    return b.begin(at.batch, at.head, at.head / group) + at.key * b.key;
  }

  // Whether the mask shows the key.
  __device__ bool is_shown(const Place& at) const {
    if (at.key >= shape.seqlen_k || score.mask.data == nullptr || score.mask.dense) return true;
    return reinterpret_cast<const std::uint8_t*>(score.mask.data)[index(score.mask, at)] != 0;
  }

  __device__ float bias(const Place& at) const {
    if (at.key >= shape.seqlen_k) return 0;
    if (!is_shown(at)) return negative_infinity;
    if (score.bias.data == nullptr || score.bias.dense) return 0;
    const float value = load_bias<T>(score.bias, index(score.bias, at));
    return value > score.mask_value ? value * bias_factor : masked_bias;
  }
};

}  // namespace flash_dmattn::cuda::sm90
