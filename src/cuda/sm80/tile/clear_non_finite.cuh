#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/ptx.cuh"
#include "cuda/primitives/warp.cuh"

namespace flash_dmattn::cuda::sm80 {

// Replaces inf and NaN in a tile of shared memory by 0.
template <class T, class Tile, class Group>
__device__ inline void clear_non_finite(Group group, std::uint32_t tile) {
#pragma unroll 1  // rare, so code size matters more than time
  for (int i = group.rank; i < Tile::bytes / 16; i += Group::size) {
    const std::uint32_t address = tile + static_cast<std::uint32_t>(i) * 16;
    store_shared_16(address, clear_non_finite_packed8<T>(load_shared_16(address)));
  }
}

}  // namespace flash_dmattn::cuda::sm80
