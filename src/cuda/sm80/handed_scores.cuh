#pragma once

#include "cuda/sm80/rare_scores.cuh"

// P and dS of transposed score tiles, [keys, queries], in the backward by keys: a value warp makes P and hands
// it to its key warp through shared memory, `words` being the lane's in block (0, 0).
namespace flash_dmattn::cuda::sm80 {

// Column block n of scores: exp2(factor s - lse). `lse2`: of the lane's columns of the block.
template <int M16, int N8>
__device__ inline void exponentiate(float factor, float2 lse2, int n, float (&s)[M16][N8][4]) {
#pragma unroll
  for (int m = 0; m < M16; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      s[m][n][e] = exp2_approx(fmaf(s[m][n][e], factor, e % 2 == 0 ? -lse2.x : -lse2.y));
  }
}

// Of column blocks 2 k and 2 k + 1 of P the operand; gathers its bits.
template <class T, int M16, int N8, int K16>
__device__ inline void pack_columns(int k, const float (&s)[M16][N8][4],
                                    std::uint32_t (&weights)[M16][K16][4], std::uint32_t& bits) {
#pragma unroll
  for (int m = 0; m < M16; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[m][k][i] =
          pack<T>(s[m][2 * k + i / 2][2 * (i % 2)], s[m][2 * k + i / 2][2 * (i % 2) + 1]);
      bits |= weights[m][k][i];
    }
  }
}

template <int M16, int K16>
__device__ inline void hand_columns(std::uint32_t words, int k,
                                    const std::uint32_t (&weights)[M16][K16][4]) {
#pragma unroll
  for (int m = 0; m < M16; ++m) hand_block(words, m, k, weights);
}

// P = exp2(factor s - lse), or s itself where it has been made with care: for the warp's own product, and handed
// over. `lse2`: of the lane's first column.
template <class T, int M16, int N8, int K16>
__device__ inline void hand_probabilities(std::uint32_t words, float factor, const float* lse2,
                                          bool careful, float (&s)[M16][N8][4],
                                          std::uint32_t (&weights)[M16][K16][4]) {
  // In the forward's order, so that s and lse fit together; with pairs the forward may round differently.
  const auto lse_of = [&](int n) { return *reinterpret_cast<const float2*>(lse2 + 8 * n); };
  float2 next[2] = {lse_of(0), lse_of(1)};
  std::uint32_t bits = 0;  // of all weights
#pragma unroll
  for (int k = 0; k < K16; ++k) {
    const float2 of_query[2] = {next[0], next[1]};
    if (k + 1 < K16) {  // loaded before the stores that it would wait for
      next[0] = lse_of(2 * k + 2);
      next[1] = lse_of(2 * k + 3);
    }
    if (!careful) {
#pragma unroll
      for (int i = 0; i < 2; ++i) exponentiate(factor, of_query[i], 2 * k + i, s);
    }
    pack_columns<T>(k, s, weights, bits);
    hand_columns(words, k, weights);
  }
  if (warp_any(exceeds_probability(bits))) limit_probabilities<T>(words, weights);
}

// dS = P (dP - delta), of the P that was handed over. `delta`: of the lane's first column.
template <class T, int M16, int N8, int K16>
__device__ inline void take_gradients(std::uint32_t words, const float* delta, bool saturate,
                                      const float (&dp_tile)[M16][N8][4],
                                      std::uint32_t (&operand)[M16][K16][4]) {
  std::uint32_t magnitude = 0;
#pragma unroll
  for (int k = 0; k < K16; ++k) {
    const float2 of_query[2] = {*reinterpret_cast<const float2*>(delta + 16 * k),
                                *reinterpret_cast<const float2*>(delta + 16 * k + 8)};
#pragma unroll
    for (int m = 0; m < M16; ++m) {
      const uint4 given = load_shared_16(block_of_operand<K16>(words, m, k));
      const std::uint32_t weights[4] = {given.x, given.y, given.z, given.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 weight = Element<T>::widen_pair(weights[i]);
        const float (&dp)[4] = dp_tile[m][2 * k + i / 2];
        operand[m][k][i] = pack<T>(weight.x * (dp[2 * (i % 2)] - of_query[i / 2].x),
                                   weight.y * (dp[2 * (i % 2) + 1] - of_query[i / 2].y));
        magnitude = add_magnitude<T>(magnitude, operand[m][k][i]);
      }
    }
  }
  if (warp_any(!is_finite_pair<T>(magnitude))) limit_gradients<T>(words, saturate, operand);
}

}  // namespace flash_dmattn::cuda::sm80
