#pragma once

#include "cuda/primitives/warp.cuh"

// Sums over the threads of a block.
namespace flash_dmattn::cuda {

// Gives numbers, from 0 on and in order, to the threads of a block. `total` receives the number of all. Functions contain
// two barriers.
template <int Threads>
class BlockNumbers {
 public:
  struct Storage {
    int counts[Threads / warp_size];
  };

  // The number of this thread, if `chosen` is true; the other threads get none.
  static __device__ int number(Storage& storage, bool chosen, int& total) {
    const unsigned ballot = warp_ballot(chosen);
    return numbers_before_warp(storage, __popc(ballot), total) + count_before(ballot, lane_id());
  }

  // The first of this thread's `count` numbers.
  static __device__ int first_number(Storage& storage, int count, int& total) {
    const int through = warp_inclusive_sum(count, lane_id());
    return numbers_before_warp(storage, shuffle(through, warp_size - 1), total) + through - count;
  }

 private:
  static __device__ int numbers_before_warp(Storage& storage, int warp_total, int& total) {
    if (lane_id() == 0) storage.counts[warp_id()] = warp_total;
    __syncthreads();
    int before = 0;
    total = 0;
    for (int w = 0; w < Threads / warp_size; ++w) {
      if (w < warp_id()) before += storage.counts[w];
      total += storage.counts[w];
    }
    __syncthreads();
    return before;
  }
};

// Adds a number of every thread of a block. Contains two barriers.
template <int Threads>
class BlockSum {
 public:
  struct Storage {
    int sums[Threads / warp_size];
  };

  static __device__ int of(Storage& storage, int mine) {
    const int warp_total = warp_sum(mine);
    if (lane_id() == 0) storage.sums[warp_id()] = warp_total;
    __syncthreads();
    int sum = 0;
    for (const int part : storage.sums) sum += part;
    __syncthreads();
    return sum;
  }
};

}  // namespace flash_dmattn::cuda
