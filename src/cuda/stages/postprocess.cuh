#pragma once

#include "cuda/attention/params.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/integers.h"
#include "cuda/primitives/math.cuh"
#include "cuda/primitives/tile_copy.cuh"

// Converts the fp32 sums of a main loop, which are in accumulator order.
namespace flash_dmattn::cuda {

// Converts the sums of dq to dq. An item is 8 columns of a row and of the row 8 below it. `Layout` describes tiles of
// `rows` rows, in which the 16 floats of an item begin at offset(row, chunk). The two columns of both rows of one lane
// of the main loop are adjacent.
template <class T, class Layout>
struct BwdPostprocessDq {
  static constexpr int chunks = Layout::columns / 8;

  Shape shape;
  const float* sums;
  OutputRows to;
  float scale;
  bool saturate;
  std::uint32_t* flags;

  long items() const {
    return static_cast<long>(Layout::count(shape)) * (Layout::rows / 2) * chunks;
  }

  __device__ void operator()(long item) const {
    const int chunk = static_cast<int>(item % chunks);
    const int two_rows = static_cast<int>(item / chunks % (Layout::rows / 2));
    const int row = two_rows / 8 * 16 + two_rows % 8;  // in the tile
    const std::int64_t tile = item / chunks / (Layout::rows / 2);
    const int tiles = ceil_div(shape.seqlen_q, Layout::rows);
    const int query = static_cast<int>(tile % tiles) * Layout::rows + row;
    if (chunk * 8 >= shape.head_dim || query >= shape.seqlen_q) return;
    const float* from = sums + tile * Layout::floats + Layout::offset(row, chunk);
    std::uint32_t upper[4];
    std::uint32_t lower[4];
    float check = 0;
    for (int i = 0; i < 4; ++i) {
      const float4 sum = __ldg(reinterpret_cast<const float4*>(from) + i);
      check += zero_if_finite(sum.x, sum.y) + zero_if_finite(sum.z, sum.w);
      upper[i] = pack_gradient<T>(sum.x * scale, sum.y * scale, saturate);
      lower[i] = pack_gradient<T>(sum.z * scale, sum.w * scale, saturate);
    }
    if (check != 0) atomicOr(flags, dq_not_finite);
    const std::int64_t head = tile / tiles;
    std::byte* const rows =
        to.data + head / shape.heads_q * to.batch + head % shape.heads_q * to.head + chunk * 16;
    store_chunk(rows + query * to.row, upper, to.aligned);
    if (query + 8 < shape.seqlen_q) store_chunk(rows + (query + 8) * to.row, lower, to.aligned);
  }
};

}  // namespace flash_dmattn::cuda
