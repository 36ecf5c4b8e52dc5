#pragma once

#include <cuda.h>

#include "cuda/params.h"
#include "cuda/sm90/key_info.h"

namespace flash_dmattn::cuda::sm90 {

// Whether scores are not just a positive multiple of q . k, or products that are not finite must be detected. Then the
// bias is added after the scores are shaped.
inline __host__ __device__ bool shapes_scores(const ForwardParams& p) {
  return p.score.form != ScoreForm::product || !p.saturate;
}

// Whether a mask or a bias has no query dimension.
inline __host__ __device__ bool has_key_biases(const ScoreParams& score) {
  return (score.mask.data != nullptr && !score.mask.dense) ||
         (score.bias.data != nullptr && !score.bias.dense);
}

struct ForwardKernelParams {
  // In 64-byte units: the TMA unit reads them.
  CUtensorMap q_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  CUtensorMap bias_map;  // of a dense bias
  CUtensorMap mask_map;  // of the bytes of a dense mask
  ForwardParams forward;
  KeyInfo info;
  float bias_factor = 0;   // of a bias, to the unit of the scores that it is added to
  bool two_heads = false;  // with DenseAccess::tiles: the rows of a work tile are of two heads
  int work_tiles = 0;
  // [1] work tiles taken beyond the first of each block; null: no block takes another one
  int* next_work = nullptr;
  // [1] not 0: some row's lse is NaN, see FixForwardKernel; null: this is not known, or each block recomputes the rows of
  // its only work tile
  std::uint32_t* needs_fix = nullptr;

  // Whether a dense mask has not been packed.
  __host__ __device__ bool reads_mask_bytes() const {
    return forward.score.mask.dense && forward.score.packed_mask.bits == nullptr;
  }

  // Of the 64 rows of a warpgroup.
  __host__ __device__ int warpgroup_queries() const { return two_heads ? 32 : 64; }
};

}  // namespace flash_dmattn::cuda::sm90
