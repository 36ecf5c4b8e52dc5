#pragma once

#include "cuda/sm90/backward/consumers/consumer_steps.cuh"

namespace flash_dmattn::cuda::sm90 {

// A consumer warpgroup with 64 of a block's 128 keys that multiplies dQ one query tile late (BackwardPolicy::late_dq).
// The steps of tile i:
//
//   tensor cores   dP(i) ..... | dV(i) .. dQ(i-1) ..     | dK(i) .. S(i+1) ..
//   threads        P(i)        | dS(i) | store dS, dQ    | begin S(i+1)
//
// Neither warpgroup waits for dS of the other in the tile that has made it, so they may be half a tile apart. Two tiles
// of dS suffice: a warpgroup passes dS of tile i after its dQ(i-1), which waited for both warpgroups' dS of tile i-1.
template <class Kernel>
class LateDqConsumer : ConsumerSteps<Kernel> {
  using Steps = ConsumerSteps<Kernel>;
  using Steps::dq_part;
  using Steps::keys_, Steps::p_, Steps::storage_, Steps::warpgroup_;
  using Steps::stage;
  using typename Steps::DkSums, typename Steps::DvSums;
  using typename Steps::Operand, typename Steps::Scores, typename Steps::T, typename Steps::Visit;
  using DqPart = float[dq_part];
  static_assert(!Kernel::has_slots, "keys must not change between dS and dQ");

 public:
  __device__ LateDqConsumer(const BackwardKernelParams& p, typename Steps::Storage& storage)
      : Steps(p, storage) {}

  // `work_count`: works of this block before, `n`: query tiles before, over all heads.
  __device__ int run(const BackwardWork& work, int work_count, int n) {
    Steps::clear(dk_);
    Steps::clear(dv_);
    Visit at(p_, work);
    if (at.has()) {
      storage_.key_pipeline.wait_full(0);
      keys_.begin(work_count);
      begin_tile(at, n);
      this->issue_scores(n, s_);
      keys_.prepare_mask(at);
      wgmma_wait<0>();
      run_tile<true>(at, n++);
#pragma unroll 1
      for (; at.has(); ++n) run_tile<false>(at, n);
      DqPart dq;
      multiply_dq(n - 1, dq);
      wgmma_wait<0>();
      this->store_dq(dq, warpgroup_);
    }
    keys_.store(DkSums{dk_}, DvSums{dv_});
    return n;
  }

 private:
  // The scores of the tile are complete, and at the end those of the next. After the last tile they are computed once
  // more, because in a branch their old values would occupy registers.
  template <bool IsFirst>
  __device__ void run_tile(Visit& at, int n) {
    DqPart dq;
    pin(s_);
    storage_.dout_pipeline.wait_full(n);
    this->issue_dp(n, dp_);
    this->make_p(at, n, s_, p_operand_);
    wgmma_wait<0>();
    pin(dp_);
    this->issue_gradient(dv_, p_operand_, storage_.dout[stage(n)]);
    if constexpr (!IsFirst) multiply_dq(n - 1, dq);
    make_ds(at, n);
    wgmma_wait<0>();  // the next scores take the registers of dV's operand
    pin(dv_);
    storage_.dout_pipeline.release(n);
    this->store_scores(n, ds_operand_);
    if constexpr (IsFirst) {
      fence_async_proxy();
    } else {
      this->store_dq(dq, warpgroup_);  // it fences dS, too
    }
    storage_.ds_pipeline.arrive_full(n);

    keys_.end_dbias(at);
    keys_.end_tile(at);
    const int next = at.advance() ? n + 1 : n;
    begin_tile(at, next);
    this->issue_gradient(dk_, ds_operand_, storage_.q[stage(n)]);
    this->issue_scores(next, s_);
    keys_.prepare_mask(at);
    wgmma_wait<1>();
    pin(dk_);
    storage_.q_pipeline.release(n);
    wgmma_wait<0>();
  }

  __device__ void begin_tile(const Visit& at, int n) {
    if (at.has()) keys_.begin_tile(at);
    storage_.q_pipeline.wait_full(n);
    Steps::begin_scores(n, s_);
  }

  __device__ void multiply_dq(int n, DqPart& dq) const {
    storage_.ds_pipeline.wait_full(n);
    this->issue_dq(n, dq);
  }

  __device__ void make_ds(const Visit& at, int n) {
    const float* const delta = storage_.stats[stage(n)].delta;
    Steps::make_ds(
        at, [&](int i) { return Element<T>::widen_packed2(p_operand_[i]); },
        [&](int j) { return Steps::two_columns(delta, j); }, p_operand_, dp_, ds_operand_);
  }

  typename Steps::Dk dk_;
  typename Steps::Dv dv_;
  Scores s_;
  Scores dp_;  // dP, then dS
  Operand p_operand_;
  Operand ds_operand_;
};

}  // namespace flash_dmattn::cuda::sm90
