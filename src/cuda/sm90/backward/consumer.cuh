#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/sm90/backward/storage.cuh"
#include "cuda/sm90/backward/work.cuh"

namespace flash_dmattn::cuda::sm90 {

// A consumer warpgroup, with 64 of a block's 128 keys. Scores are transposed, [keys, queries], so that P and dS are A
// operands of dV and dK in the registers that hold them. The steps of a query tile:
//
//   tensor cores   S ..... dP ..... | dV ..... | dQ ..... | dK ...........
//   threads        wait S | P       | dS       | wait dQ  | store dQ, begin S of the next tile | wait dK
//
// The two warpgroups exchange dS through shared memory, since dQ sums over all keys.
template <class Kernel>
class BackwardConsumer {
  using T = typename Kernel::Element;
  using Storage = typename Kernel::SharedStorage;
  using KeyTile = typename Storage::KeyTile;
  using QueryTile = typename Storage::QueryTile;
  using ScoreTile = typename Storage::ScoreTile;
  using Layout = typename Kernel::DqLayout;
  using Keys = typename Kernel::Keys;
  using Visit = typename Keys::Visit;
  using Dense = typename Kernel::Dense;
  static constexpr BackwardVariant variant = Kernel::variant;
  static constexpr BackwardPolicy policy = Kernel::policy;
  static constexpr int head_dim = Kernel::head_dim;
  static constexpr int rows = policy.rows;
  static constexpr int keys = policy.keys;
  static constexpr int scores = rows / 2;         // per thread
  static constexpr int gradients = head_dim / 2;  // elements of dk and of dv per thread
  static constexpr int dq_part = Layout::part_columns / 2;
  // Registers: 128 queries leave none for P in fp32 or for loading delta ahead; with a dense mask or bias they suffice
  // for P only.
  static constexpr bool has_room = rows == 64;
  static constexpr bool loads_delta_ahead = has_room && !variant.has_dense();
  // Key biases are a term of the exponent, where they cost no instruction; with a dense mask or bias, of the initial
  // scores, since they would occupy registers throughout the loop.
  static constexpr bool bias_in_exponent = variant.has_info() && !variant.has_dense();
  // Whether the sums of dS for the gradient of a key bias are computed together with dS in every call, instead of after
  // dS if needed. Slots nearly always need them; for elements in global memory a branch needs more registers.
  static constexpr bool sums_always = variant.has_slots() || variant.dense == DenseAccess::elements;

 public:
  __device__ BackwardConsumer(const BackwardKernelParams& p, Storage& storage)
      : p_(p),
        storage_(storage),
        // Uniform over the warp, also for the compiler: products may be in a branch on it.
        warpgroup_(shuffle(static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        keys_(p, storage, warpgroup_),
        dense_(p, storage, warpgroup_) {}

  // `work_count`: works of this block before, `n`: query tiles before, over all heads.
  __device__ int run(const BackwardWork& work, int work_count, int n) {
    clear(dk_);
    clear(dv_);
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
      keys_.leave(at, dk_, dv_);
      issue_scores(n);
      storage_.dout_pipeline.wait_full(n);
      issue_dp(n);
      keys_.prepare_mask(at);
      wgmma_wait<1>();
      pin(s_);
      make_p(at);
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
    keys_.store(dk_, dv_);
    return n;
  }

 private:
  // dS as an operand of dQ; with dense scores its rows are queries, and it is summed over its columns.
  static constexpr Major ds_major = variant.has_dense() ? Major::k : Major::mn;
  using DsOperand =
      std::conditional_t<variant.has_dense(), KMajorOperand<rows>, RowMajorOperand<keys>>;

  __device__ Visit visits(const BackwardWork& work, int n) const {
    if constexpr (variant.has_dense()) {
      return Visit(storage_, work, n);
    } else {
      return Visit(p_, work);
    }
  }

  static __device__ int stage(int n) { return Pipeline<policy.stages>::stage(n); }
  static __device__ int score_tile(int n) { return Pipeline<policy.score_tiles>::stage(n); }

  template <int N>
  static __device__ void clear(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = 0;
  }

  // The values of this thread's columns in block j of eight, out of one value for each query of a tile.
  static __device__ float2 two_columns(const float* values, int j) {
    return *reinterpret_cast<const float2*>(values + 8 * j + 2 * (lane_id() % 4));
  }

  // ---- Products ------------------------------------------------------------------------------------

  // Without overlap no product is in flight after it.
  static __device__ void end_batch() {
    wgmma_commit();
    if constexpr (!Kernel::overlaps) wgmma_wait<0>();
  }

  // Initializes S = (bias - lse) / scale + K q^T with the first term, which has the bias unless the exponent has it.
  __device__ void begin_scores(const Visit& at, int n) {
#pragma unroll
    for (int j = 0; j < rows / 8; ++j) {
      const float2 begin = two_columns(storage_.stats[stage(n)].score, j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        s_[4 * j + 2 * h] = begin.x;
        s_[4 * j + 2 * h + 1] = begin.y;
        if constexpr (variant.has_dense()) {
          s_[4 * j + 2 * h] += keys_.bias(h);
          s_[4 * j + 2 * h + 1] += keys_.bias(h);
        }
      }
    }
    dense_.begin_scores(at, n, s_);
  }

  // The address of K or V. With a dense mask or bias descriptors are recomputed for each tile: there are too few
  // uniform registers to keep them all.
  static __device__ std::uint32_t address_of_keys(const std::byte* tile) {
    std::uint32_t address = shared_address(tile);
    if constexpr (variant.has_dense()) make_opaque(address);
    return address;
  }

  __device__ KMajorOperand<keys> own_keys(const std::byte* tile) const {
    return KMajorOperand<keys>(address_of_keys(tile) + warpgroup_ * 64 * panel_row_bytes);
  }

  __device__ void issue_scores(int n) {
    const KMajorOperand<keys> k = own_keys(storage_.k);
    const KMajorOperand<rows> q(shared_address(storage_.q[stage(n)]));
    pin(s_);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < head_dim / 16; ++i) wgmma<T>(s_, k.at(i), q.at(i), true);
    end_batch();
  }

  // dP = V dout^T.
  __device__ void issue_dp(int n) {
    const KMajorOperand<keys> v = own_keys(storage_.v);
    const KMajorOperand<rows> dout(shared_address(storage_.dout[stage(n)]));
    wgmma_fence();
    wgmma_first<T, Major::k>(dp_, v.at(0), dout.at(0));
#pragma unroll
    for (int i = 1; i < head_dim / 16; ++i) wgmma<T>(dp_, v.at(i), dout.at(i), true);
    end_batch();
  }

  // dV += P^T dout or dK += dS^T q.
  __device__ void issue_gradient(float (&sums)[gradients], const std::uint32_t (&a)[scores / 2],
                                 const std::byte* queries) {
    const RowMajorOperand<rows> b(shared_address(queries));
    pin(sums);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < rows / 16; ++i) wgmma<T>(sums, a + 4 * i, b.at(i));
    end_batch();
  }

  // This warpgroup's part of dQ = dS K.
  __device__ void issue_dq(int n, float (&dq)[dq_part]) {
    const int row_panel = policy.dq == DqSplit::rows ? warpgroup_ : 0;
    const int column_panel = policy.dq == DqSplit::columns ? warpgroup_ : 0;
    const DsOperand ds(shared_address(storage_.ds[score_tile(n)]) +
                       row_panel * ScoreTile::panel_bytes);
    const RowMajorOperand<keys> k(address_of_keys(storage_.k) +
                                  column_panel * KeyTile::panel_bytes);
    wgmma_fence();
    wgmma_first<T, ds_major, Major::mn>(dq, ds.at(0), k.at(0));
#pragma unroll
    for (int i = 1; i < keys / 16; ++i) wgmma<T, ds_major, Major::mn>(dq, ds.at(i), k.at(i), true);
    end_batch();
  }

  // Computes dQ and starts dK. It waits for dV, which is in flight; dK stays in flight.
  __device__ void multiply_dq(const Visit& at, int n) {
    if constexpr (policy.dq == DqSplit::alternating) {
      wgmma_wait<0>();  // the registers of dV's operand are reused
      pin(dv_);
      storage_.dout_pipeline.release(n);
      if ((n + warpgroup_) % 2 == 0) {
        float dq[dq_part];
        issue_dq(n, dq);
        dense_.sum_heads(at, ds_operand_, n);
        issue_gradient(dk_, ds_operand_, storage_.q[stage(n)]);
        wgmma_wait<1>();
        store_dq(dq, 0);
        load_next(at, n);
      } else {
        dense_.sum_heads(at, ds_operand_, n);
        issue_gradient(dk_, ds_operand_, storage_.q[stage(n)]);
        load_next(at, n);
      }
    } else {
      float dq[dq_part];
      issue_dq(n, dq);
      dense_.sum_heads(at, ds_operand_, n);
      wgmma_wait<1>();
      pin(dv_);
      storage_.dout_pipeline.release(n);
      issue_gradient(dk_, ds_operand_, storage_.q[stage(n)]);
      load_next(at, n);
      wgmma_wait<1>();
      store_dq(dq, warpgroup_);
    }
  }

  __device__ void store_dq(float (&dq)[dq_part], int part) {
    constexpr int threads = 128 + warp_size;
    pin(dq);
    named_barrier_sync(Kernel::dq_free_barrier + part, threads);
    const auto* const words = reinterpret_cast<const std::uint32_t*>(dq);
    const std::uint32_t to =
        shared_address(storage_.dq + part * Layout::part_floats +
                       Layout::thread_offset(0, static_cast<int>(threadIdx.x) % 128));
#pragma unroll
    for (int j = 0; j < dq_part / 4; ++j) {
      store_shared_16(to + Layout::thread_offset(j, 0) * sizeof(float),
                      {words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]});
    }
    fence_async_proxy();
    named_barrier_arrive(Kernel::dq_full_barrier + part, threads);
  }

  // ---- Probabilities and their derivatives ---------------------------------------------------------

  __device__ void make_p(const Visit& at) {
    keys_.mask(at, s_);
    const float factor = p_.backward.score.factor;
    float biases[2] = {};
    if constexpr (bias_in_exponent) {
      const auto key_biases = keys_.biases_of(at);
      for (int h = 0; h < 2; ++h) biases[h] = key_biases.common(h) * factor;
      key_biases.add_delayed(s_);
    }
    std::uint32_t bits = 0;  // of all P
#pragma unroll
    for (int j = 0; j < scores / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& s = s_[4 * j + e];
        s = exp2_approx(bias_in_exponent ? fmaf(s, factor, biases[e / 2]) : s * factor);
      }
      p_operand_[2 * j] = pack<T>(s_[4 * j], s_[4 * j + 1]);
      p_operand_[2 * j + 1] = pack<T>(s_[4 * j + 2], s_[4 * j + 3]);
      bits |= p_operand_[2 * j] | p_operand_[2 * j + 1];
    }
    if (warp_any(exceeds_probability(bits))) clamp_p();
  }

  // Clamps P to [0, 1]; NaN, from a score that overflowed far below the maximum, becomes 0.
  __device__ void clamp_p() {
#pragma unroll
    for (int i = 0; i < scores / 2; ++i) {
      p_operand_[i] = saturate_packed2<T>(p_operand_[i]);
      const float2 p = Element<T>::widen_packed2(p_operand_[i]);
      s_[2 * i] = p.x;
      s_[2 * i + 1] = p.y;
    }
  }

  // dS = P (dP - delta). dV starts as soon as dP is complete.
  __device__ void make_ds(const Visit& at, int n) {
    const float* const delta = storage_.stats[stage(n)].delta;
    float2 delta_of[rows / 8];
#pragma unroll
    for (int j = 0; j < rows / 8; ++j)
      if (loads_delta_ahead) delta_of[j] = two_columns(delta, j);
    wgmma_wait<0>();
    pin(dp_);
    issue_gradient(dv_, p_operand_, storage_.dout[stage(n)]);
    std::uint32_t magnitude[4] = {};  // each of a quarter of all dS
    float sums[2] = {};
#pragma unroll
    for (int j = 0; j < rows / 8; ++j) {
      if (!loads_delta_ahead) delta_of[j] = two_columns(delta, j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = 2 * j + h;
        const float2 p =
            has_room ? float2{s_[2 * i], s_[2 * i + 1]} : Element<T>::widen_packed2(p_operand_[i]);
        const float x = p.x * (dp_[2 * i] - delta_of[j].x);
        const float y = p.y * (dp_[2 * i + 1] - delta_of[j].y);
        if constexpr (sums_always) sums[h] += x + y;
        dp_[2 * i] = x;
        dp_[2 * i + 1] = y;
        ds_operand_[i] = pack<T>(x, y);
        magnitude[i % 4] = add_magnitude<T>(magnitude[i % 4], ds_operand_[i]);
      }
    }
    if constexpr (variant.has_info() && !sums_always) {
      if (keys_.wants_sums()) {
#pragma unroll
        for (int i = 0; i < scores / 2; ++i) sums[i % 2] += dp_[2 * i] + dp_[2 * i + 1];
      }
    }
    const std::uint32_t sum = add_packed2<T>(add_packed2<T>(magnitude[0], magnitude[1]),
                                             add_packed2<T>(magnitude[2], magnitude[3]));
    if (warp_any(!is_finite_packed2<T>(sum))) clamp_ds(sums);
    if constexpr (variant.delays) keys_.biases_of(at).template keep_biased<T>(ds_operand_, sums);
    keys_.add_dbias(sums);
  }

  // Clamps dS to the limit of gradients if they saturate; dS is 0 where P is 0, even if dP is not finite.
  __device__ void clamp_ds(float (&sums)[2]) {
    using Packed2 = typename Element<T>::Packed2;
    sums[0] = sums[1] = 0;
#pragma unroll
    for (int i = 0; i < scores / 2; ++i) {
      std::uint32_t& ds = ds_operand_[i];
      if (p_.backward.saturate) ds = clamp_packed2<T>(ds, Element<T>::gradient_limit_packed2);
      ds &= __hne2_mask(reinterpret_cast<const Packed2&>(p_operand_[i]), Element<T>::pack(0, 0));
      const float2 two = Element<T>::widen_packed2(ds);
      sums[i % 2] += two.x + two.y;
    }
  }

  // Stores dS to shared memory, fenced for the products and copies that read it, and synchronizes with the other
  // warpgroup.
  __device__ void share_ds(const Visit& at, int n) {
    if constexpr (variant.has_dense()) {
      dense_.store_ds(at, ds_operand_, n);
    } else {
      store_ds_by_keys(shared_address(storage_.ds[score_tile(n)]));
    }
    named_barrier_sync(Kernel::consumer_barrier, 256);
  }

  // [keys, queries], the layout of the registers.
  __device__ void store_ds_by_keys(std::uint32_t tile) const {
    const int row = warpgroup_ * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane_id() % 16;
    // The address of the lane's row and chunk lane / 16; an exclusive or gives the addresses of the next chunks.
    const std::uint32_t to = tile + ScoreTile::offset(row, lane_id() / 16);
#pragma unroll
    for (int i = 0; i < rows / 16; ++i) {
      const std::uint32_t address = (to ^ static_cast<std::uint32_t>(i % 4 * 32)) +
                                    static_cast<std::uint32_t>(i / 4 * ScoreTile::panel_bytes);
      const std::uint32_t block[4] = {ds_operand_[4 * i], ds_operand_[4 * i + 1],
                                      ds_operand_[4 * i + 2], ds_operand_[4 * i + 3]};
      store_matrix_x4([&](int, int) { return address; }, block);
    }
    fence_async_proxy();
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
    keys_.end_tile(at);
    const bool has_next = at.advance();
    const int next = has_next ? n + 1 : n;
    if constexpr (!variant.has_dense()) {
      if (has_next) keys_.begin_tile(at);
    }
    storage_.q_pipeline.wait_full(next);
    begin_scores(at, next);
  }

  const BackwardKernelParams& p_;
  Storage& storage_;
  const int warpgroup_;
  Keys keys_;
  Dense dense_;

  float dk_[gradients];
  float dv_[gradients];
  float s_[scores];  // S, then P
  float dp_[scores];
  std::uint32_t p_operand_[scores / 2];
  std::uint32_t ds_operand_[scores / 2];
};

}  // namespace flash_dmattn::cuda::sm90
