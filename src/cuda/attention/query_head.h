#pragma once

#include <cstdint>

#include "cuda/attention/params.h"

namespace flash_dmattn::cuda {

struct QueryHead {
  int batch;
  int head;
  int kv_head;

  // The index of a row in [B, Hq, Sq].
  __device__ std::int64_t row_index(const Shape& shape, int row) const {
    return (static_cast<std::int64_t>(batch) * shape.heads_q + head) * shape.seqlen_q + row;
  }
  template <class View>
  __device__ std::int64_t element(const View& b, std::int64_t row, std::int64_t key) const {
    return b.begin(batch, head, kv_head) + row * b.query + key * b.key;
  }
};

// Head `index` of [B, Hq].
__device__ inline QueryHead query_head(const Shape& shape, int index) {
  const int head = index % shape.heads_q;
  return {index / shape.heads_q, head, head / shape.group_heads()};
}

}  // namespace flash_dmattn::cuda
