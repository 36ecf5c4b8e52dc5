#pragma once

#include "cuda/sm80/tile/p_ds_clamp.cuh"

namespace flash_dmattn::cuda::sm80 {

// The transfer of P of transposed scores, [keys, queries]: a dv warp computes it and a dk warp with the same keys reads
// it through shared memory, as the packed A operand, [M16][K16][32 lanes] of 16 bytes.
template <class T, int M16, int N8>
class PTransfer {
 public:
  static constexpr int k16 = N8 / 2;
  using Scores = float[M16][N8][4];
  using Operand = std::uint32_t[M16][k16][4];

  __device__ PTransfer(std::uint32_t shared, int lane)
      : words_(shared + static_cast<std::uint32_t>(lane * 16)), first_column_(2 * (lane % 4)) {}

  // Stores P = exp2(factor s - lse), or s if it is P already (`done`), to shared memory and to `p`. `lse` has the
  // values of the tile's queries.
  __device__ void store_p(float factor, const float* lse, bool done, Scores& s, Operand& p) const {
    const auto lse_of = [&](int n) { return two_columns(lse, n); };
    float2 next[2] = {lse_of(0), lse_of(1)};
    std::uint32_t bits = 0;  // the bitwise or of all P
#pragma unroll
    for (int k = 0; k < k16; ++k) {
      const float2 lse_log2[2] = {next[0], next[1]};
      if (k + 1 < k16) {  // loaded before the stores, for which it would wait
        next[0] = lse_of(2 * k + 2);
        next[1] = lse_of(2 * k + 3);
      }
      if (!done) {
#pragma unroll
        for (int i = 0; i < 2; ++i) exponentiate(factor, lse_log2[i], 2 * k + i, s);
      }
      pack_columns(k, s, p, bits);
#pragma unroll
      for (int m = 0; m < M16; ++m) store_transfer_block(words_, m, k, p);
    }
    if (warp_any(exceeds_probability(bits))) clamp_p<T>(words_, p);
  }

  // Computes dS = P (dP - delta) from P in shared memory. `delta` has the values of the tile's queries.
  __device__ void load_p_and_make_ds(const float* delta, bool saturate, const Scores& dp,
                                     Operand& ds) const {
    std::uint32_t magnitude = 0;
#pragma unroll
    for (int k = 0; k < k16; ++k) {
      const float2 delta_of[2] = {two_columns(delta, 2 * k), two_columns(delta, 2 * k + 1)};
#pragma unroll
      for (int m = 0; m < M16; ++m) {
        const uint4 block = load_shared_16(transfer_address<k16>(words_, m, k));
        const std::uint32_t p[4] = {block.x, block.y, block.z, block.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 p_of = Element<T>::widen_packed2(p[i]);
          const float (&dp_of)[4] = dp[m][2 * k + i / 2];
          ds[m][k][i] = pack<T>(p_of.x * (dp_of[2 * (i % 2)] - delta_of[i / 2].x),
                                p_of.y * (dp_of[2 * (i % 2) + 1] - delta_of[i / 2].y));
          magnitude = add_magnitude<T>(magnitude, ds[m][k][i]);
        }
      }
    }
    if (warp_any(!is_finite_packed2<T>(magnitude))) clamp_ds<T>(words_, saturate, ds);
  }

 private:
  // The values of the lane's two queries in column block n.
  __device__ float2 two_columns(const float* values, int n) const {
    return *reinterpret_cast<const float2*>(values + first_column_ + 8 * n);
  }

  // Computes P in the same order as the forward, so that s and lse are consistent. With dense biases the forward may
  // round differently.
  static __device__ void exponentiate(float factor, float2 lse, int n, Scores& s) {
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[m][n][e] = exp2_approx(fmaf(s[m][n][e], factor, e % 2 == 0 ? -lse.x : -lse.y));
    }
  }

  // Packs block k of the operand from two column blocks of P.
  static __device__ void pack_columns(int k, const Scores& s, Operand& p, std::uint32_t& bits) {
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&block)[4] = s[m][2 * k + i / 2];
        p[m][k][i] = pack<T>(block[2 * (i % 2)], block[2 * (i % 2) + 1]);
        bits |= p[m][k][i];
      }
    }
  }

  std::uint32_t words_;  // address of the lane's words in block (0, 0)
  int first_column_;
};

}  // namespace flash_dmattn::cuda::sm80
