#pragma once

#include "cuda/attention/params.h"
#include "cuda/primitives/warp.cuh"

namespace flash_dmattn::cuda {

// Finds the non-empty tiles of a packed mask in ascending order. All lanes of a warp search together; they load 32
// states at a time and keep a bit of each.
class NonEmptyTiles {
 public:
  // The first non-empty tile in [tile, end), or `end` if there is none. state_of(tile) returns one of PackedMask's
  // states, for tiles before `end`.
  template <class StateOf>
  __device__ int find(int tile, int end, const StateOf& state_of) {
    for (; tile < end; tile = (tile / warp_size + 1) * warp_size) {
      if (tile / warp_size != window_) load(tile / warp_size, end, state_of);
      const std::uint32_t left = some_ >> (tile % warp_size);
      if (left != 0) return tile + __ffs(static_cast<int>(left)) - 1;
    }
    return end;
  }

  // Whether the tile found last has no masked element.
  __device__ bool is_full(int tile) const { return (all_ >> (tile % warp_size) & 1) != 0; }

 private:
  template <class StateOf>
  __device__ void load(int window, int end, const StateOf& state_of) {
    window_ = window;
    const int tile = window * warp_size + lane_id();
    const std::uint32_t state = tile < end ? state_of(tile) : 0u;
    some_ = warp_ballot((state & PackedMask::some) != 0);
    all_ = warp_ballot((state & PackedMask::all) != 0);
  }

  int window_ = -1;
  std::uint32_t some_ = 0;
  std::uint32_t all_ = 0;
};

// The state of two tiles together: `some` of either, `all` of both.
__device__ inline std::uint32_t merge_states(std::uint32_t a, std::uint32_t b) {
  return ((a | b) & PackedMask::some) | (a & b & PackedMask::all);
}

// The state of the two tiles with 64 queries and the 128 keys from word `word` on. `row_tile` counts over all matrices.
__device__ inline std::uint32_t state_of_keys(const PackedMask& mask, std::int64_t row_tile,
                                              int word) {
  const std::uint8_t* const from = mask.states + row_tile * mask.words + word;
  const std::uint32_t one = __ldg(from);
  return word + 1 < mask.words ? merge_states(one, __ldg(from + 1)) : one;
}

}  // namespace flash_dmattn::cuda
