#pragma once

#include "cuda/attention/params.h"
#include "cuda/primitives/device_workspace.h"

namespace flash_dmattn::cuda::sm90 {

// Key info in memory, which PrepareKeyInfo computes from intervals, causality, key mask and key bias. It does not
// include a dense mask or bias. Rows are padded with keys that no query sees, so that a whole tile can be copied from
// any multiple of 64.
struct KeyInfo {
  static constexpr int padded(int keys) { return (keys + 63) / 64 * 64 + 128; }

  int padded_keys = 0;
  KeyInterval* ranges = nullptr;  // [batch, range_heads, padded_keys]
  // [batch, bias_heads, padded_keys], by key_bias(): -inf where mask or bias hide the key, or its masked_bias where the bias does
  float* biases = nullptr;
  // With a delay: the offset in `biases` from a key's bias to the value for queries within the delay, which is 0, or -inf
  // if the mask hides the key. 0 without a delay, and in a backward.
  std::int64_t recent = 0;
  // The offset in `biases` from a key's bias to that in the caller's unit (forward/repetition.cuh). 0 without it.
  std::int64_t caller_biases = 0;
  int batch = 1;
  int range_heads = 1;
  int bias_heads = 1;
  // Strides are in elements.
  std::int64_t range_batch = 0;
  std::int64_t range_head = 0;  // stride between kv heads
  std::int64_t bias_batch = 0;
  std::int64_t bias_head_q = 0;  // one of the two is 0
  std::int64_t bias_head_kv = 0;

  // The ranges from key 0 on.
  __device__ const KeyInterval* ranges_of(int batch_index, int kv_head) const {
    return ranges + batch_index * range_batch + kv_head * range_head;
  }
  __device__ const float* biases_of(int batch_index, int head, int kv_head) const {
    return biases + batch_index * bias_batch + head * bias_head_q + kv_head * bias_head_kv;
  }
};

// Allocates key info. Its size follows from shapes and strides.
// `has_recent_biases`: with KeyInfo::recent if biases have a delay. `has_caller_biases`: with KeyInfo::caller_biases, if
// biases have no delay.
KeyInfo allocate_key_info(const Shape& shape, const ScoreParams& score,
                          WorkspaceAllocator& workspace, bool has_recent_biases = false,
                          bool has_caller_biases = false);

}  // namespace flash_dmattn::cuda::sm90
