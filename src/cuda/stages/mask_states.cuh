#pragma once

#include "cuda/stages/packed_mask.cuh"

namespace flash_dmattn::cuda {

// Finds the states of a packed mask without its bits, for kernels that read the mask's bytes themselves, 16 at a time.
// A state is whether some element of a tile is visible. A thread reads 64 keys of one row after another until it finds
// a visible element, so it reads a sixteenth of a mask without empty tiles.
struct FindMaskStates {
  PackMaskParams params;

  long items() const { return long{params.matrices} * params.row_tiles() * params.packed.words; }

  __device__ void operator()(long i) const {
    const PackMaskParams& p = params;
    const long row_block = i / p.packed.words;  // of all matrices' row tiles
    const int row = static_cast<int>(row_block % p.row_tiles()) * PackedMask::side;
    const int matrix = static_cast<int>(row_block / p.row_tiles());
    const int key = static_cast<int>(i % p.packed.words) * PackedMask::side;
    const int end_row = min(row + PackedMask::side, p.rows);
    const bool hidden = p.causal && key > end_row - 1 + p.shift;
    p.packed.states[i] = !hidden && sees_some(matrix, row, end_row, key) ? PackedMask::some : 0;
  }

 private:
  static constexpr int rows_at_once = 4;

  __device__ bool sees_some(int matrix, int row, int end_row, int key) const {
    const PackMaskParams& p = params;
    const auto* const mask =
        reinterpret_cast<const std::byte*>(p.mask.data) + p.begin(p.mask, matrix) + key;
    const int chunks = min(p.keys - key, PackedMask::side) / 16;
    for (; row < end_row; row += rows_at_once) {
      std::uint32_t some = 0;
#pragma unroll
      for (int i = 0; i < rows_at_once; ++i) {
        const std::byte* const from = mask + min(row + i, end_row - 1) * p.mask.query;
#pragma unroll
        for (int j = 0; j < PackedMask::side / 16; ++j) {
          if (j >= chunks) continue;
          const uint4 bytes = __ldg(reinterpret_cast<const uint4*>(from) + j);
          some |= bytes.x | bytes.y | bytes.z | bytes.w;
        }
      }
      if (some != 0) return true;
    }
    return false;
  }
};

}  // namespace flash_dmattn::cuda
