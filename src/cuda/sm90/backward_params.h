#pragma once

#include <cuda.h>

#include "cuda/params.h"
#include "cuda/sm90/key_info.h"

namespace flash_dmattn::cuda::sm90 {

struct BackwardKernelParams {
  // In 64-byte units: the TMA unit reads them.
  CUtensorMap q_map;
  CUtensorMap dout_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  BackwardParams backward;
  KeyInfo info;
  float* row_stats = nullptr;  // [B, Hq, query tiles] RowStats
  float* dq_accum = nullptr;   // [B, Hq, query tiles] DqAccumLayout; null: not wanted
  OrderSemaphores order;       // of the additions to it
};

}  // namespace flash_dmattn::cuda::sm90
