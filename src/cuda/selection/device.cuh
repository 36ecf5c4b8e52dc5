#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "cuda/common/device_workspace.h"
#include "cuda/common/integers.h"
#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"

// Shared by the kernels of selection and schedules.
namespace flash_dmattn::cuda {

// The number of bits that hold the values [0, count).
constexpr int bits_for(std::int64_t count) {
  int bits = 0;
  while ((std::int64_t{1} << bits) < count) ++bits;
  return bits;
}

// Numbers the keys of a warp, of which a lane has every 32nd: `next` has the next number in each of the warp's bins. A
// key whose bin is negative takes none.
template <int BinBits, int Count>
__device__ void take_numbers(const int (&bin)[Count], int* next, int (&number)[Count]) {
  unsigned same[Count];  // lanes with a key of the same bin
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    same[i] = warp_ballot(bin[i] >= 0);
#pragma unroll
    for (int bit = 0; bit < BinBits; ++bit) {
      const bool is_set = (bin[i] >> bit & 1) != 0;
      const unsigned set = warp_ballot(is_set);
      same[i] &= is_set ? set : ~set;
    }
  }
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
