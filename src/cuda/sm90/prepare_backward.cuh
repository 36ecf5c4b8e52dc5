#pragma once

#include "cuda/common/math.cuh"
#include "cuda/common/postprocess.cuh"
#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/backward_storage.cuh"

// Before the backward's main loop, behind the preprocess that all families share.
namespace flash_dmattn::cuda::sm90 {

// RowStats of every query tile, one thread for each row.
template <int Rows>
struct PrepareRowStats {
  Shape shape;
  const float* lse_log2;
  const float* delta;
  float factor;  // log2 e times the scale
  float* stats;

  __host__ __device__ int tiles() const { return (shape.seqlen_q + Rows - 1) / Rows; }
  long items() const { return long{Rows} * tiles() * shape.batch * shape.heads_q; }

  __device__ void operator()(long item) const {
    const int row = static_cast<int>(item % Rows);
    const long tile = item / Rows;
    const int query = static_cast<int>(tile % tiles()) * Rows + row;
    const long from = tile / tiles() * shape.seqlen_q + query;
    const bool exists = query < shape.seqlen_q;
    auto& to = reinterpret_cast<RowStats<Rows>*>(stats)[tile];
    to.score[row] = exists ? -lse_log2[from] / factor : negative_infinity;
    to.delta[row] = exists ? delta[from] : 0;
  }
};

// Rows of one tensor as those of another, one thread for 8 columns of a row: a tensor that the TMA unit cannot read,
// or gradients that need not begin at multiples of 16 bytes.
struct CopyRows {
  InputRows from;
  OutputRows to;
  int seqlen;
  int heads;
  int batch;
  int head_dim;

  long items() const { return long{batch} * seqlen * heads * (head_dim / 8); }

  __device__ void operator()(long item) const {
    const int chunks = head_dim / 8;
    const long offset = item % chunks * 16;
    const long row = item / chunks / heads % seqlen;
    const long head = item / chunks % heads;
    const long b = item / chunks / heads / seqlen;
    const auto* const source = reinterpret_cast<const std::uint16_t*>(
        from.data + b * from.batch + row * from.row + head * from.head + offset);
    std::uint32_t pairs[4];
    for (int i = 0; i < 4; ++i)
      pairs[i] = source[2 * i] | static_cast<std::uint32_t>(source[2 * i + 1]) << 16;
    store_chunk(to.data + b * to.batch + row * to.row + head * to.head + offset, pairs, to.aligned);
  }
};

}  // namespace flash_dmattn::cuda::sm90
