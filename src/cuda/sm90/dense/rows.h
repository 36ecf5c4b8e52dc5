#pragma once

#include "cuda/attention/params.h"
#include "cuda/hopper/tensor_map.h"

namespace flash_dmattn::cuda::sm90 {

// A dense bias, its gradient, or a dense mask as rows of keys in 16-bit elements, where two keys of a mask are one
// element. The TMA unit reads and writes them if has_tensor_map() is true.
struct DenseRows {
  InputRows rows;
  int columns = 0;
  int heads = 1;  // 1 if broadcast
  int batch = 1;

  template <class Byte>
  DenseRows(const Shape& shape, const BroadcastView<Byte>& view, int element_bytes = 2)
      : columns(shape.seqlen_k * element_bytes / 2),
        is_aligned_(view.aligned_16B),
        seqlen_q_(shape.seqlen_q) {
    rows.data = view.data;
    rows.batch = element_bytes * view.batch;
    rows.row = element_bytes * view.query;
    rows.head = element_bytes * (view.head_q + view.head_kv);
    if (view.head_q != 0) heads = shape.heads_q;
    if (view.head_kv != 0) heads = shape.heads_kv;
    if (view.batch != 0) batch = shape.batch;
  }

  bool has_tensor_map() const {
    return is_aligned_ && cuda::has_tensor_map(rows, seqlen_q_, heads, batch);
  }
  CUtensorMap map(int box_rows, bool bf16) const {
    return make_tensor_map(rows, columns, seqlen_q_, heads, batch, box_rows, bf16);
  }

 private:
  bool is_aligned_;
  int seqlen_q_;
};

// The head and batch element of the tensor that belong to a head of the problem.
template <class Byte>
__device__ inline int2 index_in_map(const BroadcastView<Byte>& bias, int batch, int head,
                                    int kv_head) {
  const int group_index = bias.head_kv != 0 ? kv_head : 0;
  return {bias.head_q != 0 ? head : group_index, bias.batch != 0 ? batch : 0};
}

}  // namespace flash_dmattn::cuda::sm90
