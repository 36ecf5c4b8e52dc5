#pragma once

#include "cuda/hopper/ptx.cuh"
#include "cuda/primitives/warp.cuh"

namespace flash_dmattn::cuda {

// A pipeline of buffers that one warpgroup fills and others read, in order. `n` counts uses: use n takes buffer n %
// Stages, whose barriers have completed n / Stages phases before.
template <int Stages>
struct Pipeline {
  static constexpr int stages = Stages;

  alignas(8) std::uint64_t full[Stages];
  alignas(8) std::uint64_t empty[Stages];

  __device__ static int stage(int n) { return static_cast<int>(static_cast<unsigned>(n) % Stages); }

  // Called by one thread.
  __device__ void init(int producer_arrivals, int consumer_arrivals) {
    for (int i = 0; i < Stages; ++i) {
      mbarrier_init(shared_address(&full[i]), producer_arrivals);
      mbarrier_init(shared_address(&empty[i]), consumer_arrivals);
    }
  }

  // Called by one thread when no other uses the pipeline, before another init().
  __device__ void invalidate() {
    for (int i = 0; i < Stages; ++i) {
      mbarrier_invalidate(shared_address(&full[i]));
      mbarrier_invalidate(shared_address(&empty[i]));
    }
  }

  __device__ void wait_empty(int n) const { mbarrier_wait(empty_of(n), phase(n) ^ 1); }
  __device__ void wait_full(int n) const { mbarrier_wait(full_of(n), phase(n)); }
  // Waits until use n is released.
  __device__ void wait_released(int n) const { mbarrier_wait(empty_of(n), phase(n)); }
  // Releases use n with one arrival of a warp. The barrier of the warp orders the reads of all lanes before the arrival
  // of one lane.
  __device__ void release(int n) const {
    __syncwarp();
    if (elect_lane()) mbarrier_arrive(empty_of(n));
  }

  // Releases use n of a buffer of which block `rank` of the cluster has a copy.
  __device__ void release_in_cluster(int n, int rank) const {
    __syncwarp();
    if (elect_lane()) mbarrier_arrive_in_cluster(in_cluster_block(empty_of(n), rank));
  }
  // Fills use n with one arrival of a warp, which has written the buffer.
  __device__ void arrive_full(int n) const {
    __syncwarp();
    if (elect_lane()) mbarrier_arrive(full_of(n));
  }

  // Releases use n of a buffer that only products read, for which the whole warp has waited, or whose numbers every lane
  // has used. No read is left then that release() would have to order. In the forward its barrier and branch cost 1 to
  // 2 %.
  __device__ void release_operand(int n) const {
    if (lane_id() == 0) mbarrier_arrive(empty_of(n));
  }

  __device__ std::uint32_t full_of(int n) const { return shared_address(&full[stage(n)]); }

 private:
  __device__ static std::uint32_t phase(int n) { return static_cast<unsigned>(n) / Stages & 1; }
  __device__ std::uint32_t empty_of(int n) const { return shared_address(&empty[stage(n)]); }
};

}  // namespace flash_dmattn::cuda
