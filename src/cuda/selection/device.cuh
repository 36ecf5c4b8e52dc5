#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "cuda/common/carver.h"
#include "cuda/common/launch.h"

// What the kernels of selection and plan share: launching, warp arithmetic, carving the workspace.
namespace flash_dmattn::cuda {

inline constexpr int warp_size = 32;
inline constexpr unsigned all_lanes = 0xffffffffu;

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// The number of bits that hold the values [0, count).
constexpr int bits_for(std::int64_t count) {
  int bits = 0;
  while ((std::int64_t{1} << bits) < count) ++bits;
  return bits;
}

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x) % warp_size; }
__device__ inline int warp_of_thread() { return static_cast<int>(threadIdx.x) / warp_size; }

// Lanes of a ballot below this one.
__device__ inline int count_before(unsigned ballot, int lane) {
  return __popc(ballot & ((1u << lane) - 1u));
}

__device__ inline int warp_inclusive_sum(int value, int lane) {
#pragma unroll
  for (int distance = 1; distance < warp_size; distance *= 2) {
    const int other = __shfl_up_sync(all_lanes, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// The bits of all lower lanes together.
__device__ inline unsigned warp_exclusive_or(unsigned value, int lane) {
#pragma unroll
  for (int distance = 1; distance < warp_size; distance *= 2) {
    const unsigned other = __shfl_up_sync(all_lanes, value, distance);
    if (lane >= distance) value |= other;
  }
  const unsigned before = __shfl_up_sync(all_lanes, value, 1);
  return lane == 0 ? 0 : before;
}

__device__ inline int warp_sum(int value) {
#pragma unroll
  for (int distance = warp_size / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(all_lanes, value, distance);
  }
  return value;
}

// Bits [begin, end), for 0 <= begin and end <= 32.
__device__ inline unsigned bit_range(int begin, int end) {
  if (begin >= end) return 0;
  return (all_lanes << begin) & (all_lanes >> (warp_size - end));
}

// Position of the k-th set bit, from 0; the word has more than k.
__device__ inline int select_bit(unsigned word, int k) {
  int position = 0;
#pragma unroll
  for (int width = warp_size / 2; width > 0; width /= 2) {
    const int count = __popc(word & ((1u << width) - 1u));
    if (k < count) continue;
    k -= count;
    word >>= width;
    position += width;
  }
  return position;
}

// Lane b gets bit b of all lanes.
__device__ inline unsigned transpose_bits(unsigned word, int lane) {
  unsigned low = 0x0000ffffu;  // the bits that stay where lane & distance is 0
#pragma unroll
  for (int distance = warp_size / 2; distance > 0; distance /= 2) {
    const unsigned other = __shfl_xor_sync(all_lanes, word, distance);
    word = (lane & distance) == 0 ? (word & low) | ((other & low) << distance)
                                  : (word & ~low) | ((other >> distance) & low);
    low ^= low << (distance / 2);
  }
  return word;
}

}  // namespace flash_dmattn::cuda
