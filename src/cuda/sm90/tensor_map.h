#pragma once

#include <cuda.h>

#include "cuda/params.h"

// Descriptions of tensors for the TMA unit.
namespace flash_dmattn::cuda::sm90 {

// Whether the TMA unit can read a tensor: 16-byte aligned strides of less than 2^40 bytes, none of them 0 or
// negative where there is more than one element to step to.
bool has_tensor_map(const InputRows& tensor, int seqlen, int heads, int batch);

// Of a [B, S, H, D] tensor, in boxes of 64 columns of box_rows rows of one head, swizzled by 128 bytes.
CUtensorMap make_tensor_map(const InputRows& tensor, int head_dim, int seqlen, int heads, int batch,
                            int box_rows, bool bf16);

// A dense bias as rows of keys. The TMA unit reads it if has_tensor_map().
struct DenseBiasRows {
  InputRows rows;
  int heads = 1;  // 1: broadcast
  int batch = 1;

  DenseBiasRows(const Shape& shape, const ScoreParams& score);
  bool has_tensor_map() const;

 private:
  bool is_16_bit_rows_;
  int seqlen_q_;
};

}  // namespace flash_dmattn::cuda::sm90
