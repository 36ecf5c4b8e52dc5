#pragma once

#include "cuda/common/packed_mask.cuh"
#include "cuda/common/warp.cuh"

namespace flash_dmattn::cuda {

// Which tiles of 64 x 64 pairs a mask leaves empty, for a kernel that reads the mask as it is: PackedMask's
// states without bits, `some` only. Most tiles show a visible pair in the first rows that are looked at, a
// sixteenth of the mask; all of it is read where it is empty, and there nobody reads it again.
//
// A warp looks at eight tiles side by side, 512 bytes of a row at a time: at four rows, then at twelve.
struct MaskTilesKernel {
  using Params = PackMaskParams;
  static constexpr int warps = 4;
  static constexpr int threads = warps * 32;
  static constexpr int min_blocks = 8;
  static constexpr int side = PackedMask::side;
  static constexpr int warp_tiles = 8;
  static constexpr int lanes_of_tile = 32 / warp_tiles;  // 16 keys each

  struct SharedStorage {};

  static std::int64_t blocks(const Params& p, std::int64_t matrices) {
    return matrices * p.row_tiles() * key_blocks(p);
  }

  __device__ void operator()(const Params& p, SharedStorage&) const {
    const int lane = lane_id();
    const int row_block = static_cast<int>(blockIdx.x) / key_blocks(p);
    const int row_tile = row_block % p.row_tiles();
    const int matrix = row_block / p.row_tiles();
    const int tile =
        (static_cast<int>(blockIdx.x) % key_blocks(p) * warps + warp_id()) * warp_tiles +
        lane / lanes_of_tile;
    const int first_row = row_tile * side;
    const int rows = min(p.rows - first_row, side);
    const int key = tile * side + lane % lanes_of_tile * 16;
    const std::uint8_t* const from = reinterpret_cast<const std::uint8_t*>(p.mask.data) +
                                     p.begin(p.mask, matrix) + first_row * p.mask.query + key;
    const bool reached =
        tile < p.packed.words && (!p.causal || tile * side <= first_row + rows - 1 + p.shift);
    // A word that is not all there is not read: its tile counts as visible.
    bool some = reached && key < p.keys && key + 16 > p.keys;
    const bool readable = reached && key + 16 <= p.keys;
    const auto look = [&](const auto&... row) {
      const bool wanted = readable && !some;
      uint4 words[sizeof...(row)];
      int i = 0;
      ((words[i++] = wanted && row < rows ? load(from + row * p.mask.query) : uint4{0, 0, 0, 0}),
       ...);
      for (const uint4& word : words) some |= (word.x | word.y | word.z | word.w) != 0;
      const unsigned lanes = warp_ballot(some);
      constexpr unsigned mine = (1u << lanes_of_tile) - 1;
      some = (lanes >> lane / lanes_of_tile * lanes_of_tile & mine) != 0;
      return warp_all(some || !reached);
    };
    bool known = look(0, 16, 32, 48);
#pragma unroll 1
    for (int r = 1; r < 16 && !known; r += 3) {
      known = look(r, r + 1, r + 2, r + 16, r + 17, r + 18, r + 32, r + 33, r + 34, r + 48, r + 49,
                   r + 50);
    }
    if (lane % lanes_of_tile == 0 && tile < p.packed.words) {
      p.packed.states[static_cast<std::int64_t>(row_block) * p.packed.words + tile] =
          some ? PackedMask::some : std::uint8_t{0};
    }
  }

 private:
  static __host__ __device__ int key_blocks(const Params& p) {
    return (p.packed.words + warps * warp_tiles - 1) / (warps * warp_tiles);
  }
  static __device__ uint4 load(const std::uint8_t* from) {
    return __ldg(reinterpret_cast<const uint4*>(from));
  }
};

}  // namespace flash_dmattn::cuda
