#pragma once

#include <cuda.h>

#include "cuda/params.h"

// Tensor maps: descriptors of tensors for the TMA unit.
namespace flash_dmattn::cuda::sm90 {

// Whether the TMA unit can read a tensor: 16-byte aligned strides of less than 2^40 bytes, none of them 0 or
// negative where there is more than one element to step to.
bool has_tensor_map(const InputRows& tensor, int seqlen, int heads, int batch);

// The map of a [B, S, H, D] tensor, with boxes of 64 columns x box_rows rows of box_heads heads, swizzled by 128 bytes.
CUtensorMap make_tensor_map(const InputRows& tensor, int head_dim, int seqlen, int heads, int batch,
                            int box_rows, bool bf16, int box_heads = 1);

// A dense bias, or its gradient, as rows of keys. The TMA unit reads and writes it if has_tensor_map().
struct DenseBiasRows {
  InputRows rows;
  int heads = 1;  // 1: broadcast
  int batch = 1;

  template <class Byte>
  DenseBiasRows(const Shape& shape, const BroadcastView<Byte>& bias)
      : is_16_bit_rows_(bias.aligned_16B), shape_(shape) {
    rows.data = bias.data;
    rows.batch = 2 * bias.batch;
    rows.row = 2 * bias.query;
    rows.head = 2 * (bias.head_q + bias.head_kv);
    if (bias.head_q != 0) heads = shape.heads_q;
    if (bias.head_kv != 0) heads = shape.heads_kv;
    if (bias.batch != 0) batch = shape.batch;
  }

  bool has_tensor_map() const {
    return is_16_bit_rows_ && sm90::has_tensor_map(rows, shape_.seqlen_q, heads, batch);
  }
  CUtensorMap map(int box_rows, bool bf16) const {
    return make_tensor_map(rows, shape_.seqlen_k, shape_.seqlen_q, heads, batch, box_rows, bf16);
  }

 private:
  bool is_16_bit_rows_;
  Shape shape_;
};

// Its head and batch element that a head of the problem has.
template <class Byte>
__device__ inline int2 index_in_map(const BroadcastView<Byte>& bias, int batch, int head,
                                    int kv_head) {
  const int of_group = bias.head_kv != 0 ? kv_head : 0;
  return {bias.head_q != 0 ? head : of_group, bias.batch != 0 ? batch : 0};
}

}  // namespace flash_dmattn::cuda::sm90
