#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/params.h"

// fp32 sums in memory that are the same in every run. Additions depend on their order, so blocks that add
// to the same elements do it in the order of their work:
//
//   - Work is numbered in the order in which blocks start: earlier work is running or done, so that every wait for
//     it ends.
//   - A block adds to elements in ascending *order indices* and publishes the index up to which it is done. It adds
//     at an index once its predecessors have published a higher one.
//   - A block never publishes an index before its predecessors have: a wait for them is a wait for all earlier work.
//
// Blocks follow each other at a distance of one step of their loops, as in a pipeline; the cost is the time to fill it.
namespace flash_dmattn::cuda {

inline constexpr int last_order_index = 0x7ffffffe;

// By `Threads` threads that share named barrier `Barrier`: a block by default. Without `Ordered` blocks add
// in any order and nothing is compiled; with it they do so where a call has no semaphore (null).
template <bool Ordered, int Threads, int Barrier = block_barrier>
class OrderSemaphore {
 public:
  using Group = ThreadGroup<Threads>;

  struct Storage {  // in shared memory
    int work;
    int predecessor[2];  // work; negative: none
    int published[2];    // by it, as last read
    int next;            // what this block publishes after the next barrier; 0: nothing yet
  };

  // The number of this block's work. By all threads of the group, before anything else.
  static __device__ int take_work(const OrderSemaphores& semaphores, Storage& storage,
                                  Group group) {
    if (semaphores.started == nullptr) return static_cast<int>(blockIdx.x);
    if (group.rank == 0) storage.work = atomicAdd(semaphores.started, 1);
    barrier_sync<Barrier, Threads>();
    return storage.work;
  }

  __device__ OrderSemaphore(const OrderSemaphores& semaphores, Storage& storage, Group group,
                            int predecessor, int other_predecessor = -1)
      : semaphores_(semaphores), storage_(storage), group_(group) {
    if (!waits()) return;
    const bool ordered = semaphores.started != nullptr;
    storage.predecessor[0] = ordered ? predecessor : -1;
    storage.predecessor[1] = ordered ? other_predecessor : -1;
    storage.published[0] = storage.published[1] = 0;
    storage.next = 0;
  }

  // Before the barrier after which the group adds at indices up to `index`.
  __device__ void wait(int index) const {
    if (!waits()) return;
    for (int i = 0; i < 2; ++i) {
      if (storage_.predecessor[i] < 0) continue;
      const int* const from = semaphores_.published + storage_.predecessor[i];
      while (storage_.published[i] <= index) storage_.published[i] = load_acquire(from);
    }
  }

  // After a barrier that follows all additions of the step before: publishes them. The additions of this
  // step are at indices up to `index`.
  __device__ void advance(int index) const {
    if (!publishes()) return;
    if (storage_.next > 0) publish(storage_.next);
    storage_.next = index + 1;
  }

  // After all additions.
  __device__ void finish() const {
    wait(last_order_index);
    barrier_sync<Barrier, Threads>();
    if (publishes()) publish(last_order_index + 1);
  }

 private:
  // One thread polls and another publishes, in different warps: a release store waits until earlier additions are
  // done.
  __device__ bool waits() const { return group_.rank == 0; }
  __device__ bool publishes() const { return group_.rank == (Threads > warp_size ? warp_size : 0); }
  __device__ void publish(int index) const {
    if (semaphores_.started != nullptr) store_release(semaphores_.published + storage_.work, index);
  }

  const OrderSemaphores& semaphores_;
  Storage& storage_;
  Group group_;
};

template <int Threads, int Barrier>
class OrderSemaphore<false, Threads, Barrier> {
 public:
  using Group = ThreadGroup<Threads>;
  struct Storage {};

  static __device__ int take_work(const OrderSemaphores&, Storage&, Group) {
    return static_cast<int>(blockIdx.x);
  }
  __device__ OrderSemaphore(const OrderSemaphores&, Storage&, Group, int, int = -1) {}
  __device__ void wait(int) const {}
  __device__ void advance(int) const {}
  __device__ void finish() const {}
};

}  // namespace flash_dmattn::cuda
