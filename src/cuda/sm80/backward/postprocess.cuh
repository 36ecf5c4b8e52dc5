#pragma once

#include "cuda/sm80/params.h"
#include "cuda/stages/postprocess.cuh"

// Converts the fp32 sums of a main loop, which are in accumulator order.
namespace flash_dmattn::cuda::sm80 {

// Converts sums [B, Hkv, Sk, accum_columns] to dk or dv. An item is 8 columns of a row. In each 16 columns of the sums,
// the columns 2t, 2t + 1, 2t + 8, 2t + 9 of lane t of the main loop are adjacent.
template <class T>
struct BwdPostprocessDkv {
  Shape shape;
  const float* sums;
  OutputRows to;
  int head_dim;  // of `to`
  float scale;
  bool saturate;

  long items() const {
    return static_cast<long>(shape.batch) * shape.heads_kv * shape.seqlen_k * (head_dim / 8);
  }

  __device__ void operator()(long item) const {
    const int chunks = head_dim / 8;
    const int chunk = static_cast<int>(item % chunks);
    const std::int64_t row_index = item / chunks;
    const std::int64_t key = row_index % shape.seqlen_k;
    const std::int64_t head = row_index / shape.seqlen_k % shape.heads_kv;
    const std::int64_t batch = row_index / shape.seqlen_k / shape.heads_kv;
    const float* from =
        sums + row_index * accum_columns(shape.head_dim) + chunk / 2 * 16 + chunk % 2 * 2;
    std::byte* const destination =
        to.data + batch * to.batch + key * to.row + head * to.head + chunk * 16;
    std::uint32_t packed[4];
    for (int t = 0; t < 4; ++t) {
      const float2 sum = *reinterpret_cast<const float2*>(from + 4 * t);
      packed[t] = pack_gradient<T>(sum.x * scale, sum.y * scale, saturate);
    }
    store_chunk(destination, packed, to.aligned);
  }
};

}  // namespace flash_dmattn::cuda::sm80
