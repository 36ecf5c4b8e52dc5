#pragma once

#include "cuda/sm80/key_stream.cuh"

namespace flash_dmattn::cuda::sm80 {

// Puts a warp's accumulators, packed by pack(x, y, m, h), into rows [warp_row, ..) and columns
// [warp_column, ..) of a shared tile; `Order` says where among the warp's rows.
template <class Tile, class Order = InOrder, int M16, int N8, class Pack>
__device__ inline void stage_accumulators(const float (&c)[M16][N8][4], std::uint32_t tile,
                                          int warp_row, int warp_column, const Pack& pack) {
#pragma unroll
  for (int m = 0; m < M16; ++m) {
#pragma unroll
    for (int n = 0; n < N8; n += 2) {
      std::uint32_t block[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&pair)[4] = c[m][n + i / 2];
        block[i] = pack(pair[2 * (i % 2)], pair[2 * (i % 2) + 1], m, i % 2);
      }
      store_block<Tile>(
          tile, [&](int r) { return warp_row + Order::key(16 * m + r); }, warp_column + 8 * n,
          block);
    }
  }
}

// Writes rows [begin, end) of a shared tile with `lanes` threads of which this is number `lane`: row r
// to destination(r), unless that is null.
template <class Tile, class Destination>
__device__ inline void write_rows(std::uint32_t tile, int begin, int end, bool aligned,
                                  int head_dim, int lane, int lanes,
                                  const Destination& destination) {
  const int chunks = head_dim / 8;
  for (int i = lane; i < (end - begin) * Tile::chunks; i += lanes) {
    const int row = begin + i / Tile::chunks;
    const int chunk = i % Tile::chunks;
    std::byte* const to = destination(row);
    if (chunk >= chunks || to == nullptr) continue;
    const uint4 value = load_shared_16(tile + Tile::offset(row, chunk));
    if (aligned) {
      *reinterpret_cast<uint4*>(to + chunk * 16) = value;
    } else {
      auto* const halves = reinterpret_cast<std::uint16_t*>(to + chunk * 16);
      const std::uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        halves[2 * w] = static_cast<std::uint16_t>(words[w]);
        halves[2 * w + 1] = static_cast<std::uint16_t>(words[w] >> 16);
      }
    }
  }
}

// The same, with row `first` of the head in the tile's row 0.
template <class Tile>
__device__ inline void write_rows(std::uint32_t tile, int begin, int end, int first,
                                  const OutputRows& to, int batch, int head, int head_dim, int lane,
                                  int lanes) {
  std::byte* const data = to.data + batch * to.batch + head * to.head;
  write_rows<Tile>(tile, begin, end, to.aligned, head_dim, lane, lanes,
                   [&](int row) { return data + (first + row) * to.row; });
}

}  // namespace flash_dmattn::cuda::sm80
