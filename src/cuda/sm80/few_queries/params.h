#pragma once

#include "cuda/params.h"
#include "cuda/sm80/few_queries/policy.h"

namespace flash_dmattn::cuda::sm80::few_queries {

// Of a row over some of its keys: the maximum of the scores in units of log 2 (or what the weights were scaled by
// instead of it), and the sum of the weights.
struct RowSums {
  float max;
  float sum;
};

struct Params : ForwardParams {
  Params() = default;
  explicit Params(const ForwardParams& forward) : ForwardParams(forward) {}

  Split split;
  // What each block leaves of its rows, over the keys that it has: [B, Hq, Sq, splits] and
  // [B, Hq, Sq, splits, D], D the bucket.
  RowSums* sums = nullptr;
  float* outs = nullptr;
};

}  // namespace flash_dmattn::cuda::sm80::few_queries
