#pragma once

#include "cuda/sm90/backward/consumers/consumer_steps.cuh"

namespace flash_dmattn::cuda::sm90 {

// A consumer warpgroup with 64 of a block's 128 keys whose dK reads dS from shared memory (BackwardPolicy::shared_ds): at
// D 192 dK and dV leave no registers to keep it. For the same reason dP begins after P. The steps of tile i:
//
//   tensor cores   dP(i) .. dV(i) ....   | dQ(i) | dK(i) .............. | dQ's last panel | S(i+1) ....
//   threads        P(i) before | dS(i)   | wait  | store dQ             | wait, store     | wait
//
// dQ has three panels: each warpgroup makes one, and in every other tile the last.
template <class Kernel>
class SharedDsConsumer : ConsumerSteps<Kernel> {
  using Steps = ConsumerSteps<Kernel>;
  using Steps::dq_part;
  using Steps::keys_, Steps::p_, Steps::storage_, Steps::warpgroup_;
  using Steps::stage;
  using typename Steps::DkSums, typename Steps::DvSums;
  using typename Steps::Operand, typename Steps::Scores, typename Steps::T, typename Steps::Visit;
  static_assert(Kernel::policy.dq_parts(Kernel::head_dim) == 3);
  static_assert(!Kernel::has_slots, "the scores of the next tile begin before the end of a tile");

 public:
  __device__ SharedDsConsumer(const BackwardKernelParams& p, typename Steps::Storage& storage)
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
    }
#pragma unroll 1
    for (; at.has(); ++n) run_tile(at, n);
    keys_.store(DkSums{dk_}, DvSums{dv_});
    return n;
  }

 private:
  // The scores of the tile are complete, and at the end those of the next. After the last tile they are computed once
  // more, because in a branch their old values would occupy registers.
  __device__ void run_tile(Visit& at, int n) {
    pin(s_);
    this->make_p(at, n, s_, p_operand_);
    storage_.dout_pipeline.wait_full(n);
    this->issue_dp(n, s_);
    this->issue_gradient(dv_, p_operand_, storage_.dout[stage(n)]);
    wgmma_wait<1>();
    pin(s_);
    {
      Operand ds;
      make_ds(at, n, ds);
      this->store_scores(n, ds);
    }
    fence_async_proxy();
    named_barrier_sync(Kernel::consumer_barrier, 256);
    wgmma_wait<0>();
    pin(dv_);
    storage_.dout_pipeline.release(n);

    this->issue_dq(n, s_);
    this->issue_dk(n, dk_);
    wgmma_wait<1>();
    this->store_dq(s_, warpgroup_);
    if ((n + warpgroup_) % 2 == 0) {
      this->issue_dq_part(n, s_, 0, 2);
      wgmma_wait<0>();
      this->store_dq(s_, warpgroup_);
    }

    keys_.end_dbias(at);
    keys_.end_tile(at);
    const int next = at.advance() ? n + 1 : n;
    begin_tile(at, next);
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

  __device__ void make_ds(const Visit& at, int n, Operand& ds) {
    const float* const delta = storage_.stats[stage(n)].delta;
    Steps::make_ds(
        at, [&](int i) { return Element<T>::widen_packed2(p_operand_[i]); },
        [&](int j) { return Steps::two_columns(delta, j); }, p_operand_, s_, ds);
  }

  typename Steps::Dk dk_;
  typename Steps::Dv dv_;
  Scores s_;  // S, dP, dS, then parts of dQ
  Operand p_operand_;
};

}  // namespace flash_dmattn::cuda::sm90
