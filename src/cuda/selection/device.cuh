#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "cuda/primitives/device_workspace.h"
#include "cuda/primitives/integers.h"
#include "cuda/primitives/launch.h"
#include "cuda/primitives/warp.cuh"

// Functions that the kernels of selection and schedules share.
namespace flash_dmattn::cuda {

// The number of bits that can represent the values [0, count).
constexpr int bits_for(std::int64_t count) {
  int bits = 0;
  while ((std::int64_t{1} << bits) < count) ++bits;
  return bits;
}

// The lanes whose value, of few bits, equals this lane's. match_any would take a step for each distinct value.
template <int Bits>
__device__ unsigned lanes_with_same(int value) {
  unsigned same = full_mask;
#pragma unroll
  for (int bit = 0; bit < Bits; ++bit) {
    const bool is_set = (value >> bit & 1) != 0;
    const unsigned set = warp_ballot(is_set);
    same &= is_set ? set : ~set;
  }
  return same;
}

// Numbers the keys of a warp, of which a lane has every 32nd. `next` has the next number in each of the warp's bins,
// and `same` the lanes with a key in the same bin. A key with a negative bin gets no number.
template <int Count>
__device__ void take_numbers(const int (&bin)[Count], const unsigned (&same)[Count], int* next,
                             int (&number)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    const int before = count_before(same[i], lane_id());
    number[i] = bin[i] >= 0 ? next[bin[i]] + before : -1;
    __syncwarp();
    if (bin[i] >= 0 && before == 0) next[bin[i]] = number[i] + __popc(same[i]);
    __syncwarp();
  }
}

}  // namespace flash_dmattn::cuda
