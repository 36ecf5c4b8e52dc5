#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/sm90/backward/keys/key_gradients.h"
#include "cuda/sm90/backward/storage.cuh"
#include "cuda/sm90/backward/work/work.cuh"

namespace flash_dmattn::cuda::sm90 {

// The steps of a consumer warpgroup on a query tile: its products, P and dS. Scores are transposed, [keys, queries], so
// that P and dS are A operands of dV and dK in the registers that hold them. Arrays are a thread's accumulators and
// operands.
//
// With BackwardVariant::large_lse the caller's bias and lse are added after the products. Their difference is computed
// first: it is exact where P is not small.
template <class Kernel>
class ConsumerSteps {
 protected:
  using T = typename Kernel::Element;
  using Storage = typename Kernel::SharedStorage;
  using KeyTile = typename Storage::KeyTile;
  using QueryTile = typename Storage::QueryTile;
  using ScoreTile = typename Storage::ScoreTile;
  using Layout = typename Kernel::DqLayout;
  using Keys = typename Kernel::Keys;
  using Visit = typename Keys::Visit;
  static constexpr BackwardVariant variant = Kernel::variant;
  static constexpr BackwardPolicy policy = Kernel::policy;
  static constexpr int head_dim = Kernel::head_dim;
  static constexpr int value_dim = Kernel::value_dim;
  static constexpr int rows = policy.rows;
  static constexpr int keys = policy.keys;
  static constexpr int scores = rows / 2;  // per thread
  static constexpr int dq_part = Layout::part_columns / 2;
  // Key biases are a term of the exponent, where they cost no instruction; with a dense mask or bias, of the initial
  // scores, since they would occupy registers throughout the loop.
  static constexpr bool bias_in_exponent = variant.has_info() && !variant.has_dense();
  // Whether the sums of dS for the gradient of a key bias are computed together with dS in every call, instead of after
  // dS if needed. Slots nearly always need them; for elements in global memory a branch needs more registers.
  static constexpr bool sums_always = variant.has_slots() || variant.dense == DenseAccess::elements;
  using Scores = float[scores];
  using Operand = std::uint32_t[scores / 2];  // P or dS in 16 bits
  using Dk = float[head_dim / 2];             // a thread's sums
  using Dv = float[value_dim / 2];
  using DkSums = GradientSums<KeyGradient::dk, head_dim / 2>;
  using DvSums = GradientSums<KeyGradient::dv, value_dim / 2>;

  __device__ ConsumerSteps(const BackwardKernelParams& p, Storage& storage)
      : p_(p),
        storage_(storage),
        // The compiler must know that this is uniform over the warp, so that products may be in a branch on it.
        warpgroup_(shuffle(static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        keys_(p, storage, key_group()) {}

  // The number of this warpgroup's 64 keys among those of the block.
  __device__ int key_group() const { return policy.split == ConsumerSplit::keys ? warpgroup_ : 0; }

  static __device__ int stage(int n) { return Pipeline<policy.stages>::stage(n); }
  static __device__ int dout_stage(int n) { return Pipeline<policy.dout_stages>::stage(n); }
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
  __device__ void begin_scores(int n, Scores& s) const {
#pragma unroll
    for (int j = 0; j < rows / 8; ++j) {
      const float2 begin = two_columns(storage_.stats[stage(n)].score, j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        s[4 * j + 2 * h] = begin.x;
        s[4 * j + 2 * h + 1] = begin.y;
        if constexpr (variant.has_dense()) {
          s[4 * j + 2 * h] += keys_.bias(h);
          s[4 * j + 2 * h + 1] += keys_.bias(h);
        }
      }
    }
  }

  // The address of K or V. With a dense mask or bias descriptors are recomputed for each tile: there are too few
  // uniform registers to keep them all.
  static __device__ std::uint32_t address_of_keys(const std::byte* tile) {
    std::uint32_t address = shared_address(tile);
    if constexpr (variant.has_dense()) make_opaque(address);
    return address;
  }

  __device__ KMajorOperand<keys> own_keys(const std::byte* tile) const {
    return KMajorOperand<keys>(address_of_keys(tile) + key_group() * 64 * panel_row_bytes);
  }

  __device__ void issue_scores(int n, Scores& s) const {
    const KMajorOperand<keys> k = own_keys(storage_.k);
    const KMajorOperand<rows> q(shared_address(storage_.q[stage(n)]));
    pin(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < head_dim / 16; ++i) wgmma<T>(s, k.at(i), q.at(i), true);
    end_batch();
  }

  // dP = V dout^T.
  __device__ void issue_dp(int n, Scores& dp) const {
    const KMajorOperand<keys> v = own_keys(storage_.v);
    const KMajorOperand<rows> dout(shared_address(storage_.dout[dout_stage(n)]));
    wgmma_fence();
    wgmma_first<T, Major::k>(dp, v.at(0), dout.at(0));
#pragma unroll
    for (int i = 1; i < value_dim / 16; ++i) wgmma<T>(dp, v.at(i), dout.at(i), true);
    end_batch();
  }

  // dV += P^T dout or dK += dS^T q.
  template <int N>
  __device__ void issue_gradient(float (&sums)[N], const Operand& a,
                                 const std::byte* queries) const {
    const RowMajorOperand<rows> b(shared_address(queries));
    pin(sums);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < rows / 16; ++i) wgmma<T>(sums, a + 4 * i, b.at(i));
    end_batch();
  }

  // dK += dS^T q with dS in shared memory.
  __device__ void issue_dk(int n, Dk& dk) const {
    const KMajorOperand<keys> ds(shared_address(storage_.ds[score_tile(n)]) +
                                 key_group() * 64 * panel_row_bytes);
    const RowMajorOperand<rows> q(shared_address(storage_.q[stage(n)]));
    pin(dk);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < rows / 16; ++i) wgmma<T, Major::k, Major::mn>(dk, ds.at(i), q.at(i), true);
    end_batch();
  }

  // This warpgroup's part of dQ = dS K of a visit with this turn.
  __device__ void issue_dq(int n, float (&dq)[dq_part], int turn = 0) const {
    issue_dq_part(n, dq, turn, warpgroup_);
  }
  __device__ void issue_dq_part(int n, float (&dq)[dq_part], int turn, int part) const {
    const int row_panel = policy.dq == DqSplit::rows ? part : 0;
    const int column_panel = policy.dq == DqSplit::columns ? Kernel::dq_panel(turn, part) : 0;
    const DsOperand ds(shared_address(storage_.ds[score_tile(n)]) +
                       row_panel * ScoreTile::panel_bytes);
    const RowMajorOperand<keys> k(address_of_keys(storage_.k) +
                                  column_panel * KeyTile::panel_bytes);
    wgmma_fence();
    wgmma_first<T, ds_major, Major::mn>(dq, ds.at(0), k.at(0));
#pragma unroll
    for (int i = 1; i < keys / 16; ++i) wgmma<T, ds_major, Major::mn>(dq, ds.at(i), k.at(i), true);
    end_batch();
    if constexpr (policy.paired())
      add_partner_dq(n, dq, column_panel - Kernel::first_partner_panel());
  }

  // Adds the product with dS and keys of the other block.
  __device__ void add_partner_dq(int n, float (&dq)[dq_part], int panel) const {
    storage_.received.wait_full(n);
    const DsOperand ds(shared_address(storage_.partner.ds[score_tile(n)]));
    const RowMajorOperand<keys> k(shared_address(storage_.partner.k) +
                                  panel * Storage::Partner::KeyTile::panel_bytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < keys / 16; ++i) wgmma<T, ds_major, Major::mn>(dq, ds.at(i), k.at(i), true);
    end_batch();
  }

  // Releases this block's dS, of which the other block has a copy, and the copy of the other block's dS. A warpgroup that
  // makes no dQ of the tile waits first, so that the other block does not count its arrival in the previous phase.
  __device__ void release_ds(int n) const {
    if constexpr (policy.paired() && Kernel::takes_turns) storage_.received.wait_full(n);
    storage_.ds_pipeline.release(n);
    if constexpr (policy.paired()) storage_.ds_pipeline.release_in_cluster(n, 1 - Kernel::rank());
  }

  // Passes a part of dq to the warp that adds it to memory.
  __device__ void store_dq(float (&dq)[dq_part], int part) const {
    constexpr int threads = 128 + warp_size;
    pin(dq);
    named_barrier_sync(Kernel::dq_free_barrier + part, threads);
    const auto* const words = reinterpret_cast<const std::uint32_t*>(dq);
    const std::uint32_t to =
        shared_address(storage_.dq[part % policy.dq_tiles(head_dim)] +
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

  // P of scores, in place and packed.
  __device__ void make_p(const Visit& at, int n, Scores& s, Operand& p) const {
    constexpr bool finishes_scores = variant.large_lse && !variant.has_dense();
    keys_.mask(at, s);
    const float factor = p_.backward.score.factor;
    float biases[2] = {};
    if constexpr (bias_in_exponent) {
      const auto key_biases = keys_.biases_of(at);
      for (int h = 0; h < 2; ++h)
        biases[h] = finishes_scores ? key_biases.common(h) : key_biases.common(h) * factor;
      key_biases.add_delayed(s, finishes_scores ? p_.bias_factor : 1);
    }
    std::uint32_t bits = 0;  // of all P
#pragma unroll
    for (int j = 0; j < scores / 4; ++j) {
      float2 high{0, 0};
      float2 low{0, 0};
      if constexpr (finishes_scores) {
        const auto& stats = storage_.stats[stage(n)];
        high = two_columns(stats.high, j);
        low = stats.two_low(8 * j + 2 * (lane_id() % 4));
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s[4 * j + e];
        if constexpr (finishes_scores) {
          float begin = e % 2 == 0 ? high.x : high.y;
          float rest = e % 2 == 0 ? low.x : low.y;
          if constexpr (bias_in_exponent) {
            begin = fmaf(biases[e / 2], log2e, begin);
            rest = fmaf(biases[e / 2], log2e_low, rest);
          }
          x = exp2_approx(fmaf(x, factor, begin) + rest);
        } else {
          x = exp2_approx(bias_in_exponent ? fmaf(x, factor, biases[e / 2]) : x * factor);
        }
      }
      p[2 * j] = pack<T>(s[4 * j], s[4 * j + 1]);
      p[2 * j + 1] = pack<T>(s[4 * j + 2], s[4 * j + 3]);
      bits |= p[2 * j] | p[2 * j + 1];
    }
    if (warp_any(exceeds_probability(bits))) clamp_p(s, p);
  }

  // Computes dS = P (dP - delta), in place and packed, and adds the gradient of the key biases. `p_of` and `delta_of` are
  // functions of a pair's number and of a block of eight columns; `p` is P packed.
  template <class P, class Delta>
  __device__ void make_ds(const Visit& at, const P& p_of, const Delta& delta_of, const Operand& p,
                          Scores& dp, Operand& ds) {
    std::uint32_t magnitude[4] = {};  // each of a quarter of all dS
    float sums[2] = {};
#pragma unroll
    for (int j = 0; j < rows / 8; ++j) {
      const float2 delta = delta_of(j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = 2 * j + h;
        const float2 two = p_of(i);
        const float x = two.x * (dp[2 * i] - delta.x);
        const float y = two.y * (dp[2 * i + 1] - delta.y);
        if constexpr (sums_always) sums[h] += x + y;
        dp[2 * i] = x;
        dp[2 * i + 1] = y;
        ds[i] = pack<T>(x, y);
        magnitude[i % 4] = add_magnitude<T>(magnitude[i % 4], ds[i]);
      }
    }
    if constexpr (variant.has_info() && !sums_always) {
      if (keys_.wants_sums()) {
#pragma unroll
        for (int i = 0; i < scores / 2; ++i) sums[i % 2] += dp[2 * i] + dp[2 * i + 1];
      }
    }
    const std::uint32_t sum = add_packed2<T>(add_packed2<T>(magnitude[0], magnitude[1]),
                                             add_packed2<T>(magnitude[2], magnitude[3]));
    if (warp_any(!is_finite_packed2<T>(sum))) clamp_ds(p, ds, sums);
    if constexpr (variant.delays) keys_.biases_of(at).template keep_biased<T>(ds, sums);
    keys_.add_dbias(sums);
  }

  // The address of the lane's row and chunk in a tile of P or dS, [keys, queries], for blocks of 16 queries.
  __device__ std::uint32_t score_address(int n) const {
    int lane = lane_id();
    // With slots it is computed again for each tile: there is no register to keep it.
    if constexpr (variant.has_slots()) make_opaque(lane);
    const int row = key_group() * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane % 16;
    return shared_address(storage_.ds[score_tile(n)]) + ScoreTile::offset(row, lane / 16);
  }

  // The address of block i, by an exclusive or with that of block 0.
  static __device__ std::uint32_t score_block(std::uint32_t address, int i) {
    return (address ^ static_cast<std::uint32_t>(i % 4 * 32)) +
           static_cast<std::uint32_t>(i / 4 * ScoreTile::panel_bytes);
  }

  // Stores P or dS in the layout of the registers.
  __device__ void store_scores(int n, const Operand& x) const {
    const std::uint32_t to = score_address(n);
#pragma unroll
    for (int i = 0; i < rows / 16; ++i) {
      const std::uint32_t block[4] = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
      store_matrix_x4([&](int, int) { return score_block(to, i); }, block);
    }
  }

  const BackwardKernelParams& p_;
  Storage& storage_;
  const int warpgroup_;
  Keys keys_;

 private:
  // dS as an operand of dQ; with dense scores its rows are queries, and it is summed over its columns.
  static constexpr Major ds_major = variant.has_dense() ? Major::k : Major::mn;
  using DsOperand =
      std::conditional_t<variant.has_dense(), KMajorOperand<rows>, RowMajorOperand<keys>>;

  // Clamps P to [0, 1]; NaN, from a score that overflowed far below the maximum, becomes 0.
  static __device__ void clamp_p(Scores& s, Operand& p) {
#pragma unroll
    for (int i = 0; i < scores / 2; ++i) {
      p[i] = saturate_packed2<T>(p[i]);
      const float2 two = Element<T>::widen_packed2(p[i]);
      s[2 * i] = two.x;
      s[2 * i + 1] = two.y;
    }
  }

  // Clamps dS to the limit of gradients if they saturate; dS is 0 where P is 0, even if dP is not finite.
  __device__ void clamp_ds(const Operand& p, Operand& ds, float (&sums)[2]) const {
    using Packed2 = typename Element<T>::Packed2;
    sums[0] = sums[1] = 0;
#pragma unroll
    for (int i = 0; i < scores / 2; ++i) {
      if (p_.backward.saturate) ds[i] = clamp_packed2<T>(ds[i], Element<T>::gradient_limit_packed2);
      ds[i] &= __hne2_mask(reinterpret_cast<const Packed2&>(p[i]), Element<T>::pack(0, 0));
      const float2 two = Element<T>::widen_packed2(ds[i]);
      sums[i % 2] += two.x + two.y;
    }
  }
};

}  // namespace flash_dmattn::cuda::sm90
