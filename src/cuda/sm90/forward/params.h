#pragma once

#include <cuda.h>

#include "cuda/attention/params.h"
#include "cuda/sm90/key_info.h"

namespace flash_dmattn::cuda::sm90 {

// Whether scores are not just a positive multiple of q . k, or non-finite products must be detected. The bias is then
// added after the scores are shaped.
inline __host__ __device__ bool shapes_scores(const ForwardParams& p) {
  return p.score.form != ScoreForm::product || !p.saturate;
}

// Whether there is a bias without a query dimension.
inline __host__ __device__ bool has_key_bias(const ScoreParams& score) {
  return score.bias.data != nullptr && !score.bias.dense;
}

// Whether there is a mask or a bias without a query dimension.
inline __host__ __device__ bool has_key_biases(const ScoreParams& score) {
  return (score.mask.data != nullptr && !score.mask.dense) || has_key_bias(score);
}

struct ForwardKernelParams {
  // Tensor maps are aligned to 64 bytes, because the TMA unit reads them.
  CUtensorMap q_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  CUtensorMap bias_map;  // a dense bias
  CUtensorMap mask_map;  // the bytes of a dense mask
  ForwardParams forward;
  KeyInfo info;            // without arrays in a call that computes it
  float bias_factor = 0;   // converts a dense bias to the unit of the scores that it is added to
  bool two_heads = false;  // the rows of a work tile belong to two heads, with DenseAccess::tiles
  int work_tiles = 0;
  // [2] numbers of work tiles taken beyond the first of each block, by each run (repetition.cuh); null if no block takes
  // another: the call is short
  int* next_work = nullptr;
  // [1] nonzero if some row's lse is NaN (see FixForwardKernel); null if this is unknown, or if each block recomputes
  // the rows of its only work tile
  std::uint32_t* needs_fix = nullptr;
  // [1] nonzero if the call is repeated (repetition.cuh); null if it cannot be, or if blocks repeat their work tiles
  std::uint32_t* has_large_rows = nullptr;

  // Whether there is a dense mask that is not packed.
  __host__ __device__ bool reads_mask_bytes() const {
    return forward.score.mask.dense && forward.score.packed_mask.bits == nullptr;
  }

  // The number of queries in the 64 rows of a warpgroup.
  __host__ __device__ int warpgroup_queries() const { return two_heads ? 32 : 64; }
};

}  // namespace flash_dmattn::cuda::sm90
