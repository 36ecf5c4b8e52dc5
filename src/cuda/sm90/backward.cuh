#pragma once

#include "cuda/sm90/backward_consumer.cuh"
#include "cuda/sm90/backward_producer.cuh"
#include "cuda/sm90/key_block.cuh"

namespace flash_dmattn::cuda::sm90 {

// What a warp of the first warpgroup does; the others consume.
enum class WarpRole : std::uint8_t { load_tiles, write_dq };

// The backward of sm_90a, by keys: a block keeps K, V, dK, dV and the gradient of the key biases of 128 keys, and
// visits the query tiles that see some of them. dq is added to fp32 sums in memory.
template <class T, int D, KeyWalk Walk>
struct BackwardKernel {
  using Element = T;
  using Params = BackwardKernelParams;
  static constexpr int head_dim = D;
  static constexpr KeyWalk walk = Walk;
  static constexpr BackwardPolicy policy = backward_policy(D, Walk);
  static constexpr int threads = BackwardPolicy::threads;
  static constexpr int min_blocks = 1;

  using SharedStorage = BackwardStorage<D, Walk>;
  using DqLayout = DqAccumLayout<D, Walk>;
  using Keys = KeyBlock<BackwardKernel>;

  // Of bar.sync; 0 is __syncthreads, 1 the storage's.
  static constexpr int consumer_barrier = 2;
  static constexpr int dq_full_barrier = 3;  // one for each part
  static constexpr int dq_free_barrier = 5;

  static long blocks(const Params& p) {
    return KeyTile::count(p.backward.shape, BackwardPolicy::keys);
  }

  __device__ void operator()(const Params& p, SharedStorage& storage) const {
    using Semaphore = typename SharedStorage::Semaphore;
    const bool ordered = p.order.started != nullptr;
    if (threadIdx.x == 0) {
      constexpr int consumer_warps = 4 * BackwardPolicy::warpgroups;
      storage.key_pipeline.init(1, consumer_warps);
      storage.q_pipeline.init(1, consumer_warps);
      storage.dout_pipeline.init(1, consumer_warps);
      fence_mbarrier_init();
      storage.order = ordered ? atomicAdd(p.order.started, 1) : static_cast<int>(blockIdx.x);
    }
    __syncthreads();
    const KeyTile tile(p.backward.shape, BackwardPolicy::keys, ordered, storage.order);
    const int2 queries = find_queries<Walk>(p, tile, storage.bounds);
    const int tile_end = ceil_div(queries.y, policy.rows);
    const BackwardWork work{tile.batch, tile.kv_head, tile.key,
                            min(queries.x / policy.rows, tile_end), tile_end};
    if (threadIdx.x == 0) storage.work = work;
    __syncthreads();
    if (threadIdx.x < 128) {
      decrease_registers<BackwardPolicy::producer_registers>();
      const int warp = warp_id();
      if (warp == static_cast<int>(WarpRole::load_tiles)) {
        TileLoader<BackwardKernel>{p, storage}.run(work, 0);
      } else if (warp == static_cast<int>(WarpRole::write_dq)) {
        storage.semaphore.work = storage.order;
        const Semaphore semaphore(p.order, storage.semaphore, ThreadGroup<warp_size>::of_warp(),
                                  tile.before);
        DqWriter<BackwardKernel>{p, storage, semaphore}.run(work);
        semaphore.finish();
      }
    } else {
      increase_registers<BackwardPolicy::consumer_registers>();
      BackwardConsumer<BackwardKernel>(p, storage).run(work, 0);
    }
  }
};

}  // namespace flash_dmattn::cuda::sm90
