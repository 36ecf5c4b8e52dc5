#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/sm80/params.h"

// Conversions of the fp32 sums that a main loop leaves, in the order of its accumulators.
namespace flash_dmattn::cuda::sm80 {

__device__ inline void store_chunk(std::byte* to, const std::uint32_t (&pairs)[4], bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4*>(to) = {pairs[0], pairs[1], pairs[2], pairs[3]};
  } else {
    for (int i = 0; i < 8; ++i) {
      reinterpret_cast<std::uint16_t*>(to)[i] =
          static_cast<std::uint16_t>(pairs[i / 2] >> (16 * (i % 2)));
    }
  }
}

// sums [B, Hkv, Sk, accum_columns] -> dk or dv. An item is 8 columns of a row. In each 16 columns of
// the sums a lane t of the main loop has its columns 2t, 2t + 1, 2t + 8, 2t + 9 side by side.
template <class T>
struct BwdPostprocessDkv {
  Shape shape;
  const float* sums;
  OutputRows to;
  float scale;
  bool saturate;

  long items() const {
    return static_cast<long>(shape.batch) * shape.heads_kv * shape.seqlen_k * (shape.head_dim / 8);
  }

  __device__ void operator()(long item) const {
    const int chunks = shape.head_dim / 8;
    const int chunk = static_cast<int>(item % chunks);
    const std::int64_t row_index = item / chunks;
    const std::int64_t key = row_index % shape.seqlen_k;
    const std::int64_t head = row_index / shape.seqlen_k % shape.heads_kv;
    const std::int64_t batch = row_index / shape.seqlen_k / shape.heads_kv;
    const float* from =
        sums + row_index * accum_columns(shape.head_dim) + chunk / 2 * 16 + chunk % 2 * 2;
    std::byte* const destination =
        to.data + batch * to.batch + key * to.row + head * to.head + chunk * 16;
    std::uint32_t pairs[4];
    for (int t = 0; t < 4; ++t) {
      const float2 sum = *reinterpret_cast<const float2*>(from + 4 * t);
      pairs[t] = pack_gradient<T>(sum.x * scale, sum.y * scale, saturate);
    }
    store_chunk(destination, pairs, to.aligned);
  }
};

// The sums of dq -> dq. An item is 8 columns of a row and of the row 8 below it.
template <class T, int D>
struct BwdPostprocessDq {
  using Tile = DqAccumLayout<D>;
  static constexpr int chunks = D / 8;

  Shape shape;
  const float* sums;
  OutputRows to;
  float scale;
  bool saturate;
  std::uint32_t* flags;

  long items() const { return static_cast<long>(Tile::count(shape)) * (Tile::rows / 2) * chunks; }

  __device__ void operator()(long item) const {
    const int chunk = static_cast<int>(item % chunks);
    const int pair = static_cast<int>(item / chunks % (Tile::rows / 2));
    const int row = pair / 8 * 16 + pair % 8;  // in the tile
    const std::int64_t tile = item / chunks / (Tile::rows / 2);
    const int tiles = (shape.seqlen_q + Tile::rows - 1) / Tile::rows;
    const int query = static_cast<int>(tile % tiles) * Tile::rows + row;
    if (chunk * 8 >= shape.head_dim || query >= shape.seqlen_q) return;
    const int warp = row / Tile::warp_rows + chunk / Tile::column_blocks * Tile::row_warps;
    const float* from =
        sums + tile * Tile::floats +
        Tile::offset(warp, row % Tile::warp_rows / 16, chunk % Tile::column_blocks, row % 8 * 4);
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

}  // namespace flash_dmattn::cuda::sm80
