#pragma once

#include "cuda/sm90/dense/forward_producer.cuh"
#include "cuda/sm90/forward/consumer.cuh"
#include "cuda/sm90/forward/gather_producer.cuh"
#include "cuda/sm90/forward/key_info_warps.cuh"

// The forward of sm_90a, with one producer warpgroup and two or three consumer warpgroups of 64 queries each.
// Persistent blocks take work tiles from a counter.
namespace flash_dmattn::cuda::sm90 {

// D columns of q and K, Dv of V.
template <class T, int D, int Dv, ForwardVariant Variant>
struct ForwardKernel {
  using Element = T;
  using Params = ForwardKernelParams;
  static constexpr int head_dim = D;
  static constexpr int value_dim = Dv;
  static constexpr ForwardVariant variant = Variant;
  static constexpr KeyLoad load = Variant.load;
  static constexpr bool has_key_info = Variant.has_key_info;
  static constexpr DenseAccess dense = Variant.dense;
  static constexpr bool shapes = Variant.shapes;
  static constexpr bool has_references = sm90::has_references(D, Variant);
  static constexpr bool delays = supports_delay(D, Variant);
  static constexpr Repetition repetition = repetition_of(D, Dv, Variant);
  static constexpr bool overlaps = Variant.overlaps;
  static constexpr bool can_be_short = sm90::can_be_short(Variant);
  static constexpr bool can_compute_key_info = sm90::can_compute_key_info(Variant);
  static constexpr bool fixes_rows = sm90::fixes_rows(D, Variant);
  static constexpr ForwardPolicy policy = forward_policy(D, Dv, Variant);
  static_assert(has_key_info || (load == KeyLoad::tma && dense == DenseAccess::none));
  static_assert(!has_key_info || dense == DenseAccess::tiles || policy.rows() == query_tile_rows);
  static_assert(!shapes || has_key_info);
  static_assert(dense != DenseAccess::tiles || (load == KeyLoad::tma && !shapes));
  static_assert(dense != DenseAccess::elements || load == KeyLoad::any);
  static constexpr int threads = policy.threads();
  static constexpr int min_blocks = 1;
  // The number of arrivals at the barrier of a filled buffer: one by one producer thread, or one by each thread for its
  // rows. Each warp that computes key info adds one.
  static constexpr int key_arrivals = load == KeyLoad::tma ? 1 : 128;
  static constexpr int q_arrivals = load == KeyLoad::any ? 128 : 1;
  static constexpr int dense_arrivals = 2;  // one each by the warps that load biases and bits
  // Named barriers; 0 is __syncthreads.
  static constexpr int producer_barrier = 1;
  static constexpr int first_scheduler_barrier = 2;

  using SharedStorage = ForwardStorage<D, Dv, policy, has_key_info, delays>;
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
  using Producer =
      std::conditional_t<dense == DenseAccess::tiles, DenseProducer<ForwardKernel>,
                         std::conditional_t<load == KeyLoad::tma, TmaProducer<ForwardKernel>,
                                            GatherProducer<ForwardKernel>>>;

  static int work_tiles(const Params& p) {
    if constexpr (dense == DenseAccess::tiles) {
      return DenseWork<policy.warpgroups, policy.keys>::count(p);
    }
    return WorkTile::count(p.forward.shape, policy.rows());
  }

  // Converts the bias of a key to the unit of KeyInfo: that of the accumulators that begin with it, or the caller's.
  static __host__ __device__ float key_bias_factor(const Params& p) {
    return shapes ? 1 : p.bias_factor;
  }

  // Whether products are converted to units of log 2, to which biases are added. Otherwise scores have the bits of kernels
  // without ForwardVariant::shapes.
  static __host__ __device__ bool converts_scores(const ForwardParams& p) {
    return shapes && (!has_references || shapes_scores(p) || has_key_bias(p.score));
  }

  // Whether this call has no key info in memory, and warps of the producer compute it.
  static __device__ bool computes_key_info(const Params& p) {
    return can_compute_key_info && p.info.ranges == nullptr;
  }

  __device__ void operator()(const Params& p, SharedStorage& storage) const {
    if constexpr (repetition == Repetition::repeats) {
      if (p.has_large_rows != nullptr && *p.has_large_rows == 0) return;
    }
    if (threadIdx.x == 0) storage.has_large_rows = false;
    run<false>(p, storage);
    if constexpr (repetition == Repetition::by_block) {
      if (p.next_work != nullptr || !may_have_large_rows(p.forward.score)) return;
      __syncthreads();
      if (!storage.has_large_rows) return;
      if (threadIdx.x == 0) {
        storage.q_pipeline.invalidate();
        storage.k_pipeline.invalidate();
        storage.v_pipeline.invalidate();
      }
      using Repeating = ForwardKernel<T, D, D, repeating_variant(D, Variant)>;
      static_assert(Repeating::policy.consumer_registers == policy.consumer_registers &&
                    Repeating::policy.producer_registers == policy.producer_registers);
      Repeating::template run<true>(p, storage);
    }
  }

  // Computes the block's work tiles. `RepeatsBlock`: it is the second run of a short call.
  template <bool RepeatsBlock>
  static __device__ void run(const Params& p, SharedStorage& storage) {
    if (threadIdx.x == 0) {
      constexpr int consumer_warps = 4 * policy.warpgroups;
      const int info_arrivals = computes_key_info(p) ? KeyInfoWarps<ForwardKernel>::warps : 0;
      storage.q_pipeline.init(q_arrivals, consumer_warps);
      storage.k_pipeline.init(key_arrivals + info_arrivals, consumer_warps);
      storage.v_pipeline.init(key_arrivals, consumer_warps);
      if constexpr (dense == DenseAccess::tiles) {
        storage.dense.pipeline.init(dense_arrivals, consumer_warps / policy.warpgroups);
      }
      fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
      decrease_registers<policy.producer_registers>();
      if constexpr (can_compute_key_info) {
        if (computes_key_info(p) && threadIdx.x >= KeyInfoWarps<ForwardKernel>::first_thread) {
          KeyInfoWarps<ForwardKernel>{{p, storage}}.run();
          return;
        }
      }
      Producer{{p, storage}}.run();
    } else {
      increase_registers<policy.consumer_registers>();
      ForwardConsumer<ForwardKernel, RepeatsBlock>(p, storage).run();
    }
  }
};

}  // namespace flash_dmattn::cuda::sm90
