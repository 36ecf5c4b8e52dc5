#pragma once

// Primitives of a warp and of groups of threads. Blocks are one-dimensional, and all lanes of a warp take part.
namespace flash_dmattn::cuda {

inline constexpr int warp_size = 32;
inline constexpr unsigned full_mask = 0xffffffffu;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x % warp_size); }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x / warp_size); }

// Threads that share a task: a block, a warpgroup or a warp. `rank` is the rank of the calling thread, in [0, size).
template <int Size>
struct ThreadGroup {
  static constexpr int size = Size;
  int rank;

  // The block, or its first Size threads.
  static __device__ ThreadGroup of_block() { return {static_cast<int>(threadIdx.x)}; }
  static __device__ ThreadGroup of_warp() {
    static_assert(Size == warp_size);
    return {lane_id()};
  }
};

// ---- Votes and shuffles ----

__device__ inline bool warp_any(bool x) { return __any_sync(full_mask, x) != 0; }
__device__ inline bool warp_all(bool x) { return __all_sync(full_mask, x) != 0; }
__device__ inline unsigned warp_ballot(bool x) { return __ballot_sync(full_mask, x); }

template <class T>
__device__ inline T shuffle(T x, int lane) {
  return __shfl_sync(full_mask, x, lane);
}
template <class T>
__device__ inline T shuffle_xor(T x, int lane_mask) {
  return __shfl_xor_sync(full_mask, x, lane_mask);
}

// ---- Reductions, with the result in every lane ----

__device__ inline int warp_min(int x) { return __reduce_min_sync(full_mask, x); }
__device__ inline int warp_max(int x) { return __reduce_max_sync(full_mask, x); }
__device__ inline float warp_max(float x) {
  // Integers of the same order.
  const auto flip = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(flip(warp_max(flip(__float_as_int(x)))));
}

template <class T>
__device__ inline T warp_sum(T x) {
#pragma unroll
  for (int distance = warp_size / 2; distance > 0; distance /= 2) x += shuffle_xor(x, distance);
  return x;
}

// Reduces over the four lanes that share a row of an accumulator. `combine` is commutative.
template <class T, class Combine>
__device__ inline T quad_reduce(T x, const Combine& combine) {
  x = combine(x, shuffle_xor(x, 1));
  return combine(x, shuffle_xor(x, 2));
}

__device__ inline float quad_sum(float x) {
  return quad_reduce(x, [](float a, float b) { return a + b; });
}

__device__ inline float quad_max(float x) {
  return quad_reduce(x, [](float a, float b) { return fmaxf(a, b); });
}

// ---- Scans ----

// The number of lanes in a ballot below this lane.
__device__ inline int count_before(unsigned ballot, int lane) {
  return __popc(ballot & ((1u << lane) - 1u));
}

__device__ inline int warp_inclusive_sum(int value, int lane) {
#pragma unroll
  for (int distance = 1; distance < warp_size; distance *= 2) {
    const int other = __shfl_up_sync(full_mask, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// The bitwise or over all lower lanes.
__device__ inline unsigned warp_exclusive_or(unsigned value, int lane) {
#pragma unroll
  for (int distance = 1; distance < warp_size; distance *= 2) {
    const unsigned other = __shfl_up_sync(full_mask, value, distance);
    if (lane >= distance) value |= other;
  }
  const unsigned before = __shfl_up_sync(full_mask, value, 1);
  return lane == 0 ? 0 : before;
}

// ---- Bits ----

// Bits [begin, end), for 0 <= begin and end <= 32.
__device__ inline unsigned bit_range(int begin, int end) {
  if (begin >= end) return 0;
  return (full_mask << begin) & (full_mask >> (warp_size - end));
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
  unsigned low = 0x0000ffffu;  // the bits that remain in lanes with (lane & distance) == 0
#pragma unroll
  for (int distance = warp_size / 2; distance > 0; distance /= 2) {
    const unsigned other = shuffle_xor(word, distance);
    word = (lane & distance) == 0 ? (word & low) | ((other & low) << distance)
                                  : (word & ~low) | ((other >> distance) & low);
    low ^= low << (distance / 2);
  }
  return word;
}

}  // namespace flash_dmattn::cuda
