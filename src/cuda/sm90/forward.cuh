#pragma once

#include "cuda/sm90/forward_consumer.cuh"
#include "cuda/sm90/forward_producer.cuh"

// The forward of sm_90a: one warpgroup produces, two or three consume, 64 queries each. Persistent blocks
// take work tiles from a counter.
namespace flash_dmattn::cuda::sm90 {

template <class T, int D, KeyLoad Load, bool HasKeyInfo>
struct ForwardKernel {
  static_assert(HasKeyInfo || Load == KeyLoad::tma);
  static_assert(!HasKeyInfo || forward_policy(D, Load, HasKeyInfo).rows() == query_tile_rows);
  using Element = T;
  using Params = ForwardKernelParams;
  static constexpr KeyLoad load = Load;
  static constexpr int head_dim = D;
  static constexpr bool has_key_info = HasKeyInfo;
  static constexpr ForwardPolicy policy = forward_policy(D, Load, HasKeyInfo);
  static constexpr int threads = policy.threads();
  static constexpr int min_blocks = 1;
  // Of threads and of bytes for each filled buffer: a producer, or each with its copies, with any strides
  // with its stores too.
  static constexpr int key_arrivals = Load == KeyLoad::tma ? 1 : Load == KeyLoad::any ? 256 : 128;
  static constexpr int q_arrivals = Load == KeyLoad::any ? 256 : 1;
  // Of bar.sync; 0 is __syncthreads.
  static constexpr int producer_barrier = 1;
  static constexpr int first_scheduler_barrier = 2;

  using SharedStorage = ForwardStorage<D, policy, HasKeyInfo>;
  using Producer = std::conditional_t<Load == KeyLoad::tma, TmaProducer<ForwardKernel>,
                                      GatherProducer<ForwardKernel>>;

  static int blocks(int multiprocessors, int work_tiles) {
    return std::min(multiprocessors, work_tiles);
  }

  __device__ void operator()(const Params& p, SharedStorage& storage) const {
    if (threadIdx.x == 0) {
      constexpr int consumer_warps = 4 * policy.warpgroups;
      storage.q_pipeline.init(q_arrivals, consumer_warps);
      storage.k_pipeline.init(key_arrivals, consumer_warps);
      storage.v_pipeline.init(key_arrivals, consumer_warps);
      fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
      decrease_registers<policy.producer_registers>();
      Producer{{p, storage}}.run();
    } else {
      increase_registers<policy.consumer_registers>();
      ForwardConsumer<ForwardKernel>(p, storage).run();
    }
  }
};

}  // namespace flash_dmattn::cuda::sm90
