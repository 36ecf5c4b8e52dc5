#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/params.h"

// Sums in memory that are the same in every run. fp32 additions depend on their order, so the blocks
// that add to an element take turns:
//
//   - Blocks are numbered as they start and take the work of that number: those before are running
//     or done, so that to wait for them ends.
//   - A block goes through the elements that it adds to in ascending *places*, and announces which of
//     them it has passed. It adds at a place once the blocks before it have passed that place.
//   - It announces no more than they have: who waits for the one before waits for all.
//
// Blocks thus follow each other at a distance of one step of their loops, as in a pipeline. What is
// lost is the time to fill it.
namespace flash_dmattn::cuda {

inline constexpr int last_place = 0x7ffffffe;

// Not `Ordered`: the blocks add as they come.
template <bool Ordered>
class Turn {
 public:
  struct Storage {  // in shared memory
    int work;
    int before[2];  // the work that this one follows; negative: none
    int passed[2];  // by it, as far as this block knows
    int adding;     // places before this are passed with the next barrier
  };

  // The number of this block's work. By all threads, before anything else.
  static __device__ int take(const Turns& turns, Storage& storage) {
    if (threadIdx.x == 0) storage.work = atomicAdd(turns.started, 1);
    __syncthreads();
    return storage.work;
  }

  // `before`, `also_before`: the work that this one follows; negative: none.
  __device__ Turn(const Turns& turns, Storage& storage, int before, int also_before = -1)
      : turns_(turns), storage_(storage) {
    if (threadIdx.x != waiting_thread) return;
    storage.before[0] = before;
    storage.before[1] = also_before;
    storage.passed[0] = storage.passed[1] = 0;
    storage.adding = 0;
  }

  // Before the barrier after which the block adds at places up to `place`.
  __device__ void wait(int place) const {
    if (threadIdx.x != waiting_thread) return;
    for (int i = 0; i < 2; ++i) {
      if (storage_.before[i] < 0) continue;
      const int* const from = turns_.passed + storage_.before[i];
      while (storage_.passed[i] <= place) {
        storage_.passed[i] = load_acquire(from);
      }
    }
  }

  // After a barrier that all additions of the step before precede; this step adds at places up to
  // `place`.
  __device__ void begin(int place) const {
    if (threadIdx.x != announcing_thread) return;
    if (storage_.adding > 0) store_passed(storage_.adding);
    storage_.adding = place + 1;
  }

  // After all additions.
  __device__ void finish() const {
    wait(last_place);
    __syncthreads();
    if (threadIdx.x == announcing_thread) store_passed(last_place + 1);
  }

 private:
  static constexpr unsigned waiting_thread = 0;
  static constexpr unsigned announcing_thread =
      32;  // of another warp: a release waits for additions

  __device__ void store_passed(int passed) const {
    store_release(turns_.passed + storage_.work, passed);
  }

  const Turns& turns_;
  Storage& storage_;
};

template <>
class Turn<false> {
 public:
  struct Storage {};

  static __device__ int take(const Turns&, Storage&) { return static_cast<int>(blockIdx.x); }
  __device__ Turn(const Turns&, Storage&, int, int = -1) {}
  __device__ void wait(int) const {}
  __device__ void begin(int) const {}
  __device__ void finish() const {}
};

}  // namespace flash_dmattn::cuda
