#pragma once

#include "cuda/sm90/backward/storage.cuh"

namespace flash_dmattn::cuda::sm90 {

// The consumers' QueryVisits with a dense mask or bias. A visit is in shared memory, in the stage of its tile of q.
// Every member function reads it again, because there are no registers for it.
template <class Kernel>
class LoadedVisits {
  using Storage = typename Kernel::SharedStorage;

 public:
  // `n` is the number of earlier visits of this block.
  __device__ LoadedVisits(Storage& storage, const BackwardWork& work, int n)
      : storage_(storage), n_(n), has_(work.has_tiles()) {
    if (has_) storage_.q_pipeline.wait_full(n_);
  }

  __device__ int tile() const { return loaded().visit.tile; }
  __device__ int head() const { return static_cast<int>(loaded().visit.head); }
  __device__ bool masked() const { return loaded().visit.masked != 0; }
  __device__ bool is_second_of_two() const { return loaded().visit.second_of_two != 0; }

  __device__ bool has() const { return has_; }
  __device__ bool is_last() const { return loaded().is_last; }
  __device__ bool is_last_of_head() const { return loaded().is_last_of_head; }
  __device__ bool loads_next() const { return loaded().loads_next; }
  __device__ bool next_masked() const { return loaded().next_masked; }
  __device__ int next_head() const { return loaded().next_head; }

  // Moves to the next visit and returns whether there is one; after the last visit it stays there. The caller waits for
  // the tile of q before it reads the visit.
  __device__ bool advance() {
    has_ = !is_last();
    if (has_) ++n_;
    return has_;
  }

 private:
  __device__ const volatile LoadedVisit& loaded() const {
    return storage_.dense.visits[Pipeline<BackwardPolicy::stages>::stage(n_)];
  }

  Storage& storage_;
  int n_;
  bool has_;
};

}  // namespace flash_dmattn::cuda::sm90
