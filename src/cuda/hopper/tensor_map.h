#pragma once

#include <cuda.h>

#include "cuda/primitives/views.h"

// Tensor maps are descriptors of tensors for the TMA unit.
namespace flash_dmattn::cuda {

// Whether the TMA unit can read a tensor. Its strides must be multiples of 16 bytes below 2^40 bytes, and positive in
// dimensions with more than one element.
bool has_tensor_map(const InputRows& tensor, int seqlen, int heads, int batch);

// The map of a [B, S, H, D] tensor, with boxes of 64 columns x box_rows rows of box_heads heads, swizzled by 128 bytes.
CUtensorMap make_tensor_map(const InputRows& tensor, int head_dim, int seqlen, int heads, int batch,
                            int box_rows, bool bf16, int box_heads = 1);

}  // namespace flash_dmattn::cuda
