#pragma once

#include <cuda.h>

#include "cuda/params.h"

namespace flash_dmattn::cuda::sm90 {

// Key info in memory: made by PrepareForward out of intervals, causality, mask and bias of the keys.
// Rows are padded with keys that no query sees, so that a whole tile can be copied from any
// multiple of 64.
struct KeyInfo {
  static constexpr int padded(int keys) { return (keys + 63) / 64 * 64 + 128; }

  int padded_keys = 0;
  KeyInterval* ranges = nullptr;  // [batch, heads, padded_keys]
  float* biases = nullptr;        // the same; -inf where mask or bias hide the key
  // Strides in elements.
  std::int64_t range_batch = 0;
  std::int64_t range_head = 0;  // of a kv head
  std::int64_t bias_batch = 0;
  std::int64_t bias_head_q = 0;  // one of the two is 0
  std::int64_t bias_head_kv = 0;
};

// Whether scores are more than a positive multiple of q . k, or a product that is not finite has to be found: then
// the bias is added after they are shaped.
inline __host__ __device__ bool shapes_scores(const ForwardParams& p) {
  return p.score.form != ScoreForm::product || !p.saturate;
}

struct ForwardKernelParams {
  // In 64-byte units: the TMA unit reads them.
  CUtensorMap q_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  ForwardParams forward;
  KeyInfo info;
  int work_tiles = 0;
  int* next_work = nullptr;            // [1] work tiles taken beyond the first of each block
  std::uint32_t* needs_fix = nullptr;  // [1] not 0: some row's lse is NaN, see FixForwardKernel
};

}  // namespace flash_dmattn::cuda::sm90
