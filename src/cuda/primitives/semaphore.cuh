#pragma once

#include "cuda/primitives/ptx.cuh"
#include "cuda/primitives/semaphore.h"
#include "cuda/primitives/warp.cuh"

// Makes fp32 sums in memory the same in every run. The result of additions depends on their order, so blocks that add
// to the same elements do it in the order of their work:
//
//   - Work is numbered in the order in which blocks start. Earlier work is running or done, so every wait for it ends.
//   - A block adds to elements in ascending *order indices* and publishes the index up to which it is done. It adds
//     at an index once its predecessors have published a higher one.
//   - A block never publishes an index before its predecessors have, so a wait for them is a wait for all earlier work.
//
// Blocks follow each other one step of their loops apart, as in a pipeline. The cost is the time to fill the pipeline.
namespace flash_dmattn::cuda {

inline constexpr int last_order_index = 0x7ffffffe;

// All functions are called by `Threads` threads that share named barrier `Barrier`, by default a block. Without
// `Ordered`, blocks add in any order and nothing is compiled. With it, they add in any order if a call has no
// semaphore (null).
template <bool Ordered, int Threads, int Barrier = block_barrier>
class OrderSemaphore {
 public:
  using Group = ThreadGroup<Threads>;

  struct Storage {  // in shared memory
    int work;
    int predecessor[2];  // work numbers; negative if there is none
    int published[2];    // the predecessor's index, as last read
    int next;            // the index that this block publishes after the next barrier; 0 if none
  };

  // Takes the number of this block's work. Called by all threads of the group, before any other function.
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

  // Called before the barrier after which the group adds at indices up to `index`.
  __device__ void wait(int index) const {
    if (!waits()) return;
    for (int i = 0; i < 2; ++i) {
      if (storage_.predecessor[i] < 0) continue;
      const int* const from = semaphores_.published + storage_.predecessor[i];
      while (storage_.published[i] <= index) storage_.published[i] = load_acquire(from);
    }
  }

  // Publishes the additions of the previous step, after a barrier that follows all of them. The additions of this
  // step are at indices up to `index`.
  __device__ void advance(int index) const {
    if (!publishes()) return;
    if (storage_.next > 0) publish(storage_.next);
    storage_.next = index + 1;
  }

  // Called after all additions.
  __device__ void finish() const {
    wait(last_order_index);
    barrier_sync<Barrier, Threads>();
    if (publishes()) publish(last_order_index + 1);
  }

 private:
  // One thread polls and a thread of another warp publishes, because a release store waits until earlier additions
  // are done.
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
