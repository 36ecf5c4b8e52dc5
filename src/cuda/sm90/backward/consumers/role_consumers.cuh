#pragma once

#include "cuda/sm90/backward/consumers/consumer_steps.cuh"

// The two consumer warpgroups of a block whose 64 keys both have (ConsumerSplit::roles). The first computes P and dV,
// the second dS and dK, and each a part of dQ:
//
//   first    P(i) | dV(i) .... S(i+1) .... | dQ(i) ..             | store dQ
//   second   dS(i) | dK(i) ............... | dQ(i) .. dP(i+1) ... | store dQ
//
// With BackwardPolicy::late_dq both multiply dQ(i-1) there, so that the first does not wait for dS(i): it makes P(i+1)
// during dK(i).
//
// P and then dS of a query tile are in the same bytes of shared memory: a warp of the second warpgroup reads P of its 16
// keys and overwrites it. `ds_pipeline` passes dS to both warpgroups. A tile is free for another P when both, and with
// pairs of blocks also those of the other block, have their products with dS.
namespace flash_dmattn::cuda::sm90 {

template <class Kernel>
class ScoreConsumer : ConsumerSteps<Kernel> {
  using Steps = ConsumerSteps<Kernel>;
  using Steps::dq_part, Steps::policy;
  using Steps::keys_, Steps::p_, Steps::storage_, Steps::warpgroup_;
  using typename Steps::DvSums, typename Steps::Visit;

 public:
  __device__ ScoreConsumer(const BackwardKernelParams& p, typename Steps::Storage& storage)
      : Steps(p, storage) {}

  // `work_count`: works of this block before, `n`: query tiles before, over all heads.
  __device__ int run(const BackwardWork& work, int work_count, int n) {
    Steps::clear(dv_);
    Visit at(p_, work);
    const int first = n;
    int before = 0;  // the turn of the tile before
    if (at.has()) {
      if constexpr (!Kernel::has_slots) storage_.key_pipeline.wait_full(0);
      keys_.begin(work_count);
      keys_.begin_tile(at);
      start_scores(n);
      end_scores();
    }
#pragma unroll 1
    for (; at.has(); ++n) {
      keys_.leave(at, DvSums{dv_});
      keys_.prepare_mask(at);
      this->make_p(at, n, s_, p_operand_);
      storage_.ds_pipeline.wait_empty(n);
      this->store_scores(n, p_operand_);
      named_barrier_arrive(Kernel::p_barrier, 256);
      storage_.dout_pipeline.wait_full(n);
      this->issue_gradient(dv_, p_operand_, storage_.dout[Steps::dout_stage(n)]);
      const int turn = Kernel::turn(at);
      advance(at, n);
      wgmma_wait<1>();
      pin(dv_);
      storage_.dout_pipeline.release(n);
      if constexpr (policy.late_dq) {
        if (n > first) {
          multiply_dq(n - 1, before);
        } else {
          end_scores();
          // The barrier counts one P: the second warpgroup must have taken the first before it counts the next.
          // Later the wait for a free tile ensures that.
          storage_.ds_pipeline.wait_full(n);
        }
        before = turn;
      } else {
        multiply_dq(n, turn);
      }
      storage_.q_pipeline.release(n);
      keys_.release();
    }
    if (policy.late_dq && n > first) multiply_dq(n - 1, before);
    keys_.store(DvSums{dv_});
    return n;
  }

 private:
  // Computes and stores this warpgroup's part of dQ of a tile, while the next scores are in flight.
  __device__ void multiply_dq(int n, int turn) {
    storage_.ds_pipeline.wait_full(n);
    if (Kernel::makes_dq(turn, warpgroup_)) {
      float dq[dq_part];
      this->issue_dq(n, dq, turn);
      end_scores();
      this->release_ds(n);
      this->store_dq(dq, warpgroup_);
    } else {
      end_scores();
      this->release_ds(n);
    }
  }

  __device__ void start_scores(int n) {
    storage_.q_pipeline.wait_full(n);
    this->begin_scores(n, s_);
    this->issue_scores(n, s_);
  }

  __device__ void end_scores() {
    wgmma_wait<0>();
    pin(s_);
  }

  // Moves to the next query tile and starts its scores; after the last tile its own once more, because in a branch
  // their old values would occupy registers.
  __device__ void advance(Visit& at, int n) {
    keys_.end_tile(at);
    const bool has_next = at.advance();
    if (has_next) keys_.begin_tile(at);
    start_scores(has_next ? n + 1 : n);
  }

  typename Steps::Dv dv_;
  typename Steps::Scores s_;  // S, then P
  typename Steps::Operand p_operand_;
};

template <class Kernel>
class GradientConsumer : ConsumerSteps<Kernel> {
  using Steps = ConsumerSteps<Kernel>;
  using Steps::dq_part, Steps::policy, Steps::rows, Steps::stage;
  using Steps::keys_, Steps::p_, Steps::storage_, Steps::warpgroup_;
  using typename Steps::DkSums, typename Steps::T, typename Steps::Visit;

 public:
  __device__ GradientConsumer(const BackwardKernelParams& p, typename Steps::Storage& storage)
      : Steps(p, storage) {}

  // As ScoreConsumer::run.
  __device__ int run(const BackwardWork& work, int work_count, int n) {
    Steps::clear(dk_);
    Visit at(p_, work);
    const int first = n;
    int before = 0;  // the turn of the tile before
    bool has_tile = at.has();
    if (has_tile) {
      if constexpr (!Kernel::has_slots) storage_.key_pipeline.wait_full(0);
      // The keys of a block are prepared by the first warpgroup, before its first P.
      if constexpr (Kernel::has_slots) {
        keys_.begin(work_count);
        keys_.begin_tile(at);
      }
      storage_.dout_pipeline.wait_full(n);
      this->issue_dp(n, dp_);
      wgmma_wait<0>();
      pin(dp_);
      storage_.dout_pipeline.release(n);
    }
#pragma unroll 1
    for (; has_tile; ++n) {
      keys_.leave(at, DkSums{dk_});
      make_ds(at, n);
      share_ds(n);
      this->issue_gradient(dk_, ds_operand_, storage_.q[stage(n)]);
      const int turn = Kernel::turn(at);
      const int dq_turn = policy.late_dq ? before : turn;
      const int dq_tile = policy.late_dq ? n - 1 : n;
      const bool has_dq = !policy.late_dq || n > first;
      before = turn;
      // Waits for dK and dQ while dP of the next tile is in flight.
      const auto end_products = [&] {
        has_tile = advance(at, n);
        wgmma_wait<1>();
        pin(dk_);
        storage_.q_pipeline.release(n);
        if (has_dq) this->release_ds(dq_tile);
      };
      if (has_dq && Kernel::makes_dq(dq_turn, warpgroup_)) {
        float dq[dq_part];
        this->issue_dq(dq_tile, dq, dq_turn);
        end_products();
        this->store_dq(dq, warpgroup_);
      } else {
        end_products();
      }
      wgmma_wait<0>();
      pin(dp_);
      if (has_tile) storage_.dout_pipeline.release(n + 1);
      keys_.release();
    }
    if (policy.late_dq && n > first) {
      if (Kernel::makes_dq(before, warpgroup_)) {
        float dq[dq_part];
        this->issue_dq(n - 1, dq, before);
        wgmma_wait<0>();
        this->release_ds(n - 1);
        this->store_dq(dq, warpgroup_);
      } else {
        this->release_ds(n - 1);
      }
    }
    keys_.store(DkSums{dk_});
    return n;
  }

 private:
  __device__ void make_ds(const Visit& at, int n) {
    storage_.q_pipeline.wait_full(n);
    const float* const delta = storage_.stats[stage(n)].delta;
    named_barrier_sync(Kernel::p_barrier, 256);
    typename Steps::Operand p;
    load_p(n, p);
    Steps::make_ds(
        at, [&](int i) { return Element<T>::widen_packed2(p[i]); },
        [&](int j) { return Steps::two_columns(delta, j); }, p, dp_, ds_operand_);
  }

  // Loads P in the layout of the registers. Other lanes of the warp then overwrite it with dS.
  __device__ void load_p(int n, typename Steps::Operand& p) const {
    const std::uint32_t from = this->score_address(n);
#pragma unroll
    for (int i = 0; i < rows / 16; ++i) {
      std::uint32_t block[4];
      ldmatrix_x4(block, Steps::score_block(from, i));
#pragma unroll
      for (int j = 0; j < 4; ++j) p[4 * i + j] = block[j];
    }
    __syncwarp();
  }

  // Passes dS to both warpgroups and to the other block.
  __device__ void share_ds(int n) const {
    this->store_scores(n, ds_operand_);
    fence_async_proxy();
    storage_.ds_pipeline.arrive_full(n);
    storage_.ds_pipeline.wait_full(n);
    if constexpr (policy.paired()) {
      constexpr int bytes = Steps::ScoreTile::bytes;
      if (threadIdx.x % 128 < warp_size && elect_lane()) {
        const std::uint32_t received = storage_.received.full_of(n);
        const int other = 1 - Kernel::rank();
        mbarrier_arrive_expect(received, bytes);
        bulk_copy_in_cluster(
            in_cluster_block(shared_address(storage_.partner.ds[Steps::score_tile(n)]), other),
            shared_address(storage_.ds[Steps::score_tile(n)]), bytes,
            in_cluster_block(received, other));
      }
      __syncwarp();
    }
  }

  // Moves to the next query tile and starts its dP. Returns whether there is one; if not, the product is of whatever
  // dout there is, because in a branch the old values would occupy registers.
  __device__ bool advance(Visit& at, int n) {
    keys_.end_dbias(at);
    keys_.end_tile(at);
    const bool has_next = at.advance();
    if (has_next) {
      if constexpr (Kernel::has_slots) keys_.begin_tile(at);
      storage_.dout_pipeline.wait_full(n + 1);
    }
    this->issue_dp(n + 1, dp_);
    return has_next;
  }

  typename Steps::Dk dk_;
  typename Steps::Scores dp_;  // dP, then dS
  typename Steps::Operand ds_operand_;
};

}  // namespace flash_dmattn::cuda::sm90
