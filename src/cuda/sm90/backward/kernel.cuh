#pragma once

#include "cuda/sm90/backward/consumers/consumer.cuh"
#include "cuda/sm90/backward/consumers/late_dq_consumer.cuh"
#include "cuda/sm90/backward/consumers/role_consumers.cuh"
#include "cuda/sm90/backward/consumers/shared_ds_consumer.cuh"
#include "cuda/sm90/backward/keys/key_block.cuh"
#include "cuda/sm90/backward/producer/dq_writer.cuh"
#include "cuda/sm90/backward/producer/tile_loader.cuh"
#include "cuda/sm90/backward/producer/unseen_keys.cuh"
#include "cuda/sm90/backward/work/key_runs.h"
#include "cuda/sm90/dense/backward_loader.cuh"
#include "cuda/sm90/dense/backward_scores.cuh"
#include "cuda/sm90/dense/dbias_writer.cuh"
#include "cuda/sm90/slots/block.cuh"
#include "cuda/sm90/slots/loader.cuh"

namespace flash_dmattn::cuda::sm90 {

// The warps of the producer warpgroup; the other warpgroups are consumers. The last two serve slots, or a dense mask or bias.
enum ProducerWarp : int { load_tiles, write_dq, first_of_variant };
enum SlotWarp : int { load_slots = first_of_variant, clear_unseen_keys };
enum DenseWarp : int { write_dbias = first_of_variant, load_dense };

// The key-major backward of sm_90a. A block keeps K, V, dK, dV and the gradient of the key biases of 128 keys (64
// above D 128), and visits the query tiles that see some of them. dq is added to fp32 sums in memory. The keys are neighbours,
// with a block for each such tile, or the changing keys of as many slots, in persistent blocks. q and K have D columns, V
// and dout Dv.
template <class T, int D, int Dv, BackwardVariant Variant>
struct BackwardKernel {
  using Element = T;
  using Params = BackwardKernelParams;
  static constexpr int head_dim = D;
  static constexpr int value_dim = Dv;
  static constexpr BackwardVariant variant = Variant;
  static constexpr bool has_slots = Variant.has_slots();
  static constexpr bool overlaps = Variant.overlaps;
  static constexpr BackwardPolicy policy = backward_policy(D, Dv, Variant);
  static constexpr int threads = BackwardPolicy::threads;
  static constexpr int min_blocks = 1;

  using SharedStorage = BackwardStorage<D, Dv, Variant>;
  using DqLayout = DqAccumLayout<D, Variant>;
  using Keys = std::conditional_t<has_slots, SlotBlock<BackwardKernel>, KeyBlock<BackwardKernel>>;
  using DenseReader =
      std::conditional_t<Variant.dense == DenseAccess::tiles, DenseTileScores<BackwardKernel>,
                         DenseElementScores<BackwardKernel>>;
  using Dense = std::conditional_t<Variant.has_dense(), DenseReader, NoDenseScores<BackwardKernel>>;

  // Numbers for bar.sync; 0 is __syncthreads, and 1 is the storage's.
  static constexpr int consumer_barrier = 2;
  static constexpr int dq_full_barrier = 3;  // one for each part
  static constexpr int dq_free_barrier = 5;
  static constexpr int p_barrier = 7;  // P is in shared memory, with ConsumerSplit::roles

  static long blocks(const Params& p) {
    const long works = has_slots ? p.slots.plan_shape.blocks
                                 : KeyTile::count(p.backward.shape, policy.work_keys());
    return works * policy.cluster;
  }

  // Which of two blocks this is.
  static __device__ int rank() { return policy.paired() ? cluster_rank() : 0; }
  // The first key of the other block.
  static __device__ int partner_key(const BackwardWork& work) {
    return work.key + (rank() == 0 ? policy.keys : -policy.keys);
  }
  static constexpr bool takes_turns = policy.takes_turns(D);
  // The number of a visit, which decides whose turn it is to make a panel of dq. It does not depend on the block, so
  // that additions can have an order.
  template <class Visit>
  static __device__ int turn(const Visit& at) {
    return takes_turns ? at.tile() + at.head() : 0;
  }
  // The panel of dq that a warpgroup makes of a visit, with DqSplit::columns.
  static __device__ int dq_panel(int turn, int warpgroup) {
    const int place = 2 * rank() + warpgroup;
    return takes_turns ? (place + turn) % policy.dq_places() : place;
  }
  // Whether a warpgroup makes a panel of dq of a visit.
  static __device__ bool makes_dq(int turn, int warpgroup) {
    return !takes_turns || dq_panel(turn, warpgroup) < D / panel_columns;
  }
  // The first panel of dq that this block makes, of keys of the other block.
  static __device__ int first_partner_panel() {
    return takes_turns ? 0 : rank() * SharedStorage::Partner::KeyTile::panels;
  }

  __device__ void operator()(const Params& p, SharedStorage& storage) const {
    if (((*p.backward.flags & lse_is_large) != 0) != Variant.large_lse) return;
    const bool ordered = p.order.started != nullptr;
    if (threadIdx.x == 0) {
      init_pipelines(storage);
      if (rank() == 0) {
        storage.work_number =
            ordered ? atomicAdd(p.order.started, 1) : static_cast<int>(blockIdx.x) / policy.cluster;
      }
    }
    policy.paired() ? cluster_sync() : __syncthreads();
    const int number =
        *(policy.paired() ? in_cluster_block(&storage.work_number, 0) : &storage.work_number);
    const int predecessor = has_slots ? -1 : find_work(p, storage, number);
    if (threadIdx.x < 128) {
      decrease_registers<BackwardPolicy::producer_registers>();
      const int warp = warp_id();
      if (warp == load_tiles) {
        const TileLoader<BackwardKernel> loader{p, storage};
        int n = 0;
        for_each_work(p, storage, [&](const BackwardWork& work, const SlotPart&, int) {
          n = loader.run(work, n);
        });
      } else if (warp == write_dq) {
        storage.semaphore.work = number * policy.cluster + rank();
        using Writer = DqWriter<BackwardKernel>;
        typename Writer::Order turns(p, storage, predecessor);
        const Writer writer{p, storage, turns};
        for_each_work(p, storage,
                      [&](const BackwardWork& work, const SlotPart&, int) { writer.run(work); });
        turns.finish();
      } else if (has_slots && warp == load_slots) {
        if constexpr (has_slots) {
          const SlotLoader<BackwardKernel> loader{p, storage};
          int round = 0;
          for_each_work(p, storage,
                        [&](const BackwardWork& work, const SlotPart& part, int work_count) {
                          round = loader.run(work, part, work_count, round);
                        });
        }
      } else if (has_slots && warp == clear_unseen_keys) {
        if constexpr (has_slots) UnseenKeys<BackwardKernel>{p}.clear();
      } else if (Variant.has_dense() && warp == write_dbias) {
        if constexpr (Variant.has_dense())
          DbiasWriter<BackwardKernel>{p, storage}.run(storage.work[0]);
      } else if (Variant.has_dense() && warp == load_dense) {
        if constexpr (Variant.dense == DenseAccess::tiles) {
          DenseTileLoader<BackwardKernel>{p, storage}.run(storage.work[0]);
        } else if constexpr (Variant.has_dense()) {
          DbiasClearer<BackwardKernel>(p, storage, storage.work[0]).finish();
        }
      }
    } else {
      increase_registers<BackwardPolicy::consumer_registers>();
      if constexpr (policy.split == ConsumerSplit::keys) {
        using Early = std::conditional_t<policy.shared_ds, SharedDsConsumer<BackwardKernel>,
                                         BackwardConsumer<BackwardKernel>>;
        using Consumer = std::conditional_t<policy.late_dq, LateDqConsumer<BackwardKernel>, Early>;
        consume<Consumer>(p, storage);
      } else if (shuffle(static_cast<int>(threadIdx.x) / 128, 0) == 1) {
        consume<ScoreConsumer<BackwardKernel>>(p, storage);
      } else {
        consume<GradientConsumer<BackwardKernel>>(p, storage);
      }
    }
    if constexpr (policy.paired()) {
      // The other block may still copy to this block's shared memory or arrive there.
      __syncwarp();
      cluster_sync();
    }
  }

 private:
  static __device__ void init_pipelines(SharedStorage& storage) {
    constexpr int consumer_warps = 4 * BackwardPolicy::warpgroups;
    storage.key_pipeline.init(1, consumer_warps);
    storage.q_pipeline.init(1, consumer_warps);
    storage.dout_pipeline.init(1, consumer_warps);
    if constexpr (policy.split == ConsumerSplit::roles)
      storage.ds_pipeline.init(4, consumer_warps * policy.cluster);
    if constexpr (policy.split == ConsumerSplit::keys && policy.late_dq)
      storage.ds_pipeline.init(consumer_warps, consumer_warps);
    if constexpr (policy.paired()) storage.received.init(1, 1);
    if constexpr (has_slots) storage.slots.pipeline.init(warp_size, consumer_warps);
    if constexpr (Variant.has_dense()) {
      storage.dense.computed.init(consumer_warps, 1);
    }
    if constexpr (Variant.dense == DenseAccess::tiles) {
      storage.dense.loaded.init(1, consumer_warps);
    }
    fence_mbarrier_init();
  }

  template <class Consumer>
  static __device__ void consume(const Params& p, SharedStorage& storage) {
    Consumer consumer(p, storage);
    int n = 0;
    for_each_work(p, storage, [&](const BackwardWork& work, const SlotPart&, int work_count) {
      n = consumer.run(work, work_count, n);
    });
  }

  // Finds the work of a block of neighbouring keys from its number in the order of additions. Returns the preceding work
  // that adds to the same dq.
  static __device__ int find_work(const Params& p, SharedStorage& storage, int number) {
    constexpr int keys = policy.work_keys();
    const Shape& shape = p.backward.shape;
    KeyTile tile(shape, keys, p.blocks.section_heads, number);
    tile.key =
        place_in_run(tile.key / keys, ceil_div(shape.seqlen_k, keys), p.blocks.run_blocks) * keys;
    if constexpr (Variant.has_dense()) {
      if (threadIdx.x == 0) {
        const int list = QueryVisitLists::list(shape, tile.batch, tile.kv_head, tile.key);
        storage.work[0] = {tile.batch, tile.kv_head, tile.key, 0, p.visits.count[list]};
      }
    } else {
      const int first = rank() * policy.keys;
      const int2 queries =
          find_queries<Variant, keys>(p, tile, storage.bounds, [&](int i, KeyRecord record) {
            if constexpr (Variant.placement == KeyPlacement::block_key_info) {
              if (i < first || i >= first + policy.keys) return;
              if constexpr (Variant.large_lse)
                record.bias = unscaled_bias<T>(p.backward, tile.batch, tile.kv_head, record);
              storage.block.records[i - first] = record;
            }
          });
      if (threadIdx.x == 0) {
        const int tile_end = ceil_div(queries.y, policy.rows);
        storage.work[0] = {tile.batch, tile.kv_head, tile.key + first,
                           min(queries.x / policy.rows, tile_end), tile_end};
      }
    }
    __syncthreads();
    return tile.before < 0 ? -1 : tile.before * policy.cluster + rank();
  }

  // Calls body(work, part, work_count) for every work of a block.
  template <class Body>
  static __device__ void for_each_work(const Params& p, const SharedStorage& storage,
                                       const Body& body) {
    if constexpr (has_slots) {
      int work_count = 0;
#pragma unroll 1
      for (int i = 0;; ++i) {
        const int block = static_cast<int>(blockIdx.x) / policy.cluster;
        const int place = p.slots.plan.part(p.slots.plan_shape.blocks, block, i);
        if (place < 0) break;
        const SlotPart part = p.slots.plan.parts[place];
        if (part.unit_begin >= part.unit_end) continue;
        const BackwardWork work = work_of(p, part);
        if (work.has_tiles()) body(work, part, work_count++);
      }
    } else {
      body(storage.work[0], SlotPart{}, 0);
    }
  }
};

}  // namespace flash_dmattn::cuda::sm90
