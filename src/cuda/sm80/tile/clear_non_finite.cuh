#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/ptx.cuh"
#include "cuda/primitives/warp.cuh"

namespace flash_dmattn::cuda::sm80 {

// Replaces inf and NaN in a tile of shared memory by 0.
template <class T, class Tile, class Group>
__device__ inline void clear_non_finite(Group group, std::uint32_t tile) {
  const auto clean = [](std::uint32_t two) {
    constexpr std::uint32_t exponent = Element<T>::exponent_mask;
    if ((two & exponent) == exponent) two &= 0xffff0000u;
    if ((two >> 16 & exponent) == exponent) two &= 0x0000ffffu;
    return two;
  };
#pragma unroll 1  // rare, so code size matters more than time
  for (int i = group.rank; i < Tile::bytes / 16; i += Group::size) {
    const std::uint32_t address = tile + static_cast<std::uint32_t>(i) * 16;
    const uint4 value = load_shared_16(address);
    store_shared_16(address, {clean(value.x), clean(value.y), clean(value.z), clean(value.w)});
  }
}

}  // namespace flash_dmattn::cuda::sm80
