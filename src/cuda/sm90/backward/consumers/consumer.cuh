#pragma once

#include "cuda/sm90/backward/consumers/consumer_steps.cuh"

namespace flash_dmattn::cuda::sm90 {

// A consumer warpgroup with 64 of a block's 128 keys (ConsumerSplit::keys). The steps of a query tile:
//
//   tensor cores   S ..... dP ..... | dV ..... | dQ ..... | dK ...........
//   threads        wait S | P       | dS       | wait dQ  | store dQ, begin S of the next tile | wait dK
//
// The two warpgroups exchange dS through shared memory, since dQ sums over all keys.
template <class Kernel>
class BackwardConsumer : ConsumerSteps<Kernel> {
  using Steps = ConsumerSteps<Kernel>;
  using Steps::dq_part, Steps::policy, Steps::rows, Steps::variant;
  using Steps::keys_, Steps::p_, Steps::storage_, Steps::warpgroup_;
  using Steps::stage;
  using typename Steps::DkSums, typename Steps::DvSums;
  using typename Steps::Operand, typename Steps::Scores, typename Steps::T, typename Steps::Visit;
  // Registers: 128 queries leave none for P in fp32 or for loading delta ahead; with a dense mask or bias they suffice
  // for P only.
  static constexpr bool keeps_fp32_p = rows == 64;
  static constexpr bool loads_delta_ahead = keeps_fp32_p && !variant.has_dense();

 public:
  __device__ BackwardConsumer(const BackwardKernelParams& p, typename Steps::Storage& storage)
      : Steps(p, storage), dense_(p, storage, warpgroup_) {}

  // `work_count`: works of this block before, `n`: query tiles before, over all heads.
  __device__ int run(const BackwardWork& work, int work_count, int n) {
    Steps::clear(dk_);
    Steps::clear(dv_);
    Visit at = visits(work, n);
    if (at.has()) {
      if constexpr (!Kernel::has_slots) storage_.key_pipeline.wait_full(0);
      keys_.begin(work_count);
      dense_.begin(work, at, n);
      keys_.begin_tile(at);
      storage_.q_pipeline.wait_full(n);
      begin_scores(at, n);
    }
#pragma unroll 1
    for (; at.has(); ++n) {
      keys_.leave(at, DkSums{dk_}, DvSums{dv_});
      this->issue_scores(n, s_);
      storage_.dout_pipeline.wait_full(n);
      this->issue_dp(n, dp_);
      keys_.prepare_mask(at);
      wgmma_wait<1>();
      pin(s_);
      this->make_p(at, n, s_, p_operand_);
      make_ds(at, n);
      share_ds(at, n);
      multiply_dq(at, n);
      advance(at, n);
      wgmma_wait<0>();
      pin(dk_);
      storage_.q_pipeline.release(n);
      if constexpr (variant.dense == DenseAccess::tiles) storage_.dense.loaded.release(n);
      keys_.release();
    }
    keys_.store(DkSums{dk_}, DvSums{dv_});
    return n;
  }

 private:
  __device__ Visit visits(const BackwardWork& work, int n) const {
    if constexpr (variant.has_dense()) {
      return Visit(storage_, work, n);
    } else {
      return Visit(p_, work);
    }
  }

  __device__ void begin_scores(const Visit& at, int n) {
    Steps::begin_scores(n, s_);
    dense_.begin_scores(at, n, s_);
    if constexpr (variant.large_lse && variant.has_dense()) {
      // Biases as large as lse leave differences in which what rounding lse leaves is significant.
#pragma unroll
      for (int j = 0; j < rows / 8; ++j) {
        const float2 low = storage_.stats[stage(n)].two_low(8 * j + 2 * (lane_id() % 4));
#pragma unroll
        for (int e = 0; e < 4; ++e) s_[4 * j + e] += e % 2 == 0 ? low.x : low.y;
      }
    }
  }

  // Computes dQ and starts dK. It waits for dV, which is in flight; dK stays in flight.
  __device__ void multiply_dq(const Visit& at, int n) {
    if constexpr (policy.dq == DqSplit::alternating) {
      wgmma_wait<0>();  // the registers of dV's operand are reused
      pin(dv_);
      storage_.dout_pipeline.release(n);
      if ((n + warpgroup_) % 2 == 0) {
        float dq[dq_part];
        this->issue_dq(n, dq);
        dense_.sum_heads(at, ds_operand_, n);
        this->issue_gradient(dk_, ds_operand_, storage_.q[stage(n)]);
        wgmma_wait<1>();
        this->store_dq(dq, 0);
        load_next(at, n);
      } else {
        dense_.sum_heads(at, ds_operand_, n);
        this->issue_gradient(dk_, ds_operand_, storage_.q[stage(n)]);
        load_next(at, n);
      }
    } else {
      float dq[dq_part];
      this->issue_dq(n, dq);
      dense_.sum_heads(at, ds_operand_, n);
      wgmma_wait<1>();
      pin(dv_);
      storage_.dout_pipeline.release(n);
      this->issue_gradient(dk_, ds_operand_, storage_.q[stage(n)]);
      load_next(at, n);
      wgmma_wait<1>();
      this->store_dq(dq, warpgroup_);
    }
  }

  // dS. dV starts as soon as dP is complete.
  __device__ void make_ds(const Visit& at, int n) {
    const float* const delta = storage_.stats[stage(n)].delta;
    float2 ahead[rows / 8];
#pragma unroll
    for (int j = 0; j < rows / 8; ++j)
      if (loads_delta_ahead) ahead[j] = Steps::two_columns(delta, j);
    wgmma_wait<0>();
    pin(dp_);
    this->issue_gradient(dv_, p_operand_, storage_.dout[stage(n)]);
    const auto p_of = [&](int i) {
      return keeps_fp32_p ? float2{s_[2 * i], s_[2 * i + 1]}
                          : Element<T>::widen_packed2(p_operand_[i]);
    };
    const auto delta_of = [&](int j) {
      return loads_delta_ahead ? ahead[j] : Steps::two_columns(delta, j);
    };
    Steps::make_ds(at, p_of, delta_of, p_operand_, dp_, ds_operand_);
  }

  // Stores dS to shared memory, fenced for the products and copies that read it, and synchronizes with the other
  // warpgroup.
  __device__ void share_ds(const Visit& at, int n) {
    if constexpr (variant.has_dense()) {
      dense_.store_ds(at, ds_operand_, n);
    } else {
      this->store_scores(n, ds_operand_);
      fence_async_proxy();
    }
    named_barrier_sync(Kernel::consumer_barrier, 256);
  }

  // Loads mask and bias of visit n, the one after `at`, while the threads wait for dQ and dK.
  __device__ void load_next(const Visit& at, int n) {
    if constexpr (variant.has_dense()) {
      dense_.load_next(at, n);
      keys_.load_next(at);
    }
  }

  // Moves to the next query tile and initializes its scores, while the product dK runs. After the last tile they are
  // initialized once more with the same values: in a branch their old values would occupy registers.
  __device__ void advance(Visit& at, int n) {
    keys_.end_dbias(at);
    keys_.end_tile(at);
    const bool has_next = at.advance();
    const int next = has_next ? n + 1 : n;
    if constexpr (!variant.has_dense()) {
      if (has_next) keys_.begin_tile(at);
    }
    storage_.q_pipeline.wait_full(next);
    begin_scores(at, next);
  }

  typename Kernel::Dense dense_;
  typename Steps::Dk dk_;
  typename Steps::Dv dv_;
  Scores s_;  // S, then P
  Scores dp_;
  Operand p_operand_;
  Operand ds_operand_;
};

}  // namespace flash_dmattn::cuda::sm90
