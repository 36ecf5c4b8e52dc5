#pragma once

#include "cuda/common/careful.cuh"
#include "cuda/common/fragment.cuh"

// What the backward by keys does with P and dS where their numbers are out of the ordinary: apart from its
// main loop, which only asks whether they are.
namespace flash_dmattn::cuda::sm80 {

// Where a lane's four words of block (m, k) of an operand lie that a warp hands over, [M16][K16][32 lanes].
// `words`: those of block (0, 0).
template <int K16>
__device__ inline std::uint32_t block_of_operand(std::uint32_t words, int m, int k) {
  return words + static_cast<std::uint32_t>((m * K16 + k) * 32 * 16);
}

template <int M16, int K16>
__device__ inline void hand_block(std::uint32_t words, int m, int k,
                                  const std::uint32_t (&operand)[M16][K16][4]) {
  store_shared_16(block_of_operand<K16>(words, m, k),
                  {operand[m][k][0], operand[m][k][1], operand[m][k][2], operand[m][k][3]});
}

// P, which the lane has handed over at `words`, to [0, 1]; a NaN, of a score that overflowed far below the
// maximum, becomes 0. Where one is 2 or more, negative or a NaN; what is above 1 and below 2 is rounding.
template <class T, int M16, int K16>
__device__ inline void limit_probabilities(std::uint32_t words,
                                           std::uint32_t (&weights)[M16][K16][4]) {
#pragma unroll
  for (int m = 0; m < M16; ++m) {
#pragma unroll
    for (int k = 0; k < K16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[m][k][i] = saturate_pair<T>(weights[m][k][i]);
      hand_block(words, m, k, weights);
    }
  }
}

// dS of the P at `words`: no probability, no gradient, not even that of a dp that is not finite.
template <class T, int M16, int K16>
__device__ inline void limit_gradients(std::uint32_t words, bool saturate,
                                       std::uint32_t (&gradients)[M16][K16][4]) {
  const auto zero = Element<T>::pack(0, 0);
#pragma unroll
  for (int m = 0; m < M16; ++m) {
#pragma unroll
    for (int k = 0; k < K16; ++k) {
      const uint4 given = load_shared_16(block_of_operand<K16>(words, m, k));
      const std::uint32_t weights[4] = {given.x, given.y, given.z, given.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto weight = reinterpret_cast<const typename Element<T>::Pair&>(weights[i]);
        std::uint32_t& gradient = gradients[m][k][i];
        if (saturate) gradient = clamp_pair<T>(gradient, Element<T>::gradient_pair);
        gradient &= __hne2_mask(weight, zero);
      }
    }
  }
}

struct HeadOfPairs {
  int batch;
  int head;
  int kv_head;
};

// Probabilities of scores [keys, queries] where lse needs more than one float or scores may have overflowed.
// By a loop over local memory, for unrolled it is a third of the program. `lse2`: of the lane's columns of
// the tile, whose first query is first_row. key(m, h): of the lane's accumulator rows.
template <class T, bool Pairs, int M16, int N8, class Key>
__device__ inline void make_careful_probabilities(const BackwardParams& p, HeadOfPairs of,
                                                  int first_row, std::uint32_t flags,
                                                  const float* lse2, const Key& key_of,
                                                  float (&s)[M16][N8][4]) {
  const int lane = lane_id();
  const float factor = p.score.exponent;
  const float* const low =
      p.lse2_low +
      (static_cast<std::int64_t>(of.batch) * p.shape.heads_q + of.head) * p.shape.seqlen_q +
      first_row;
  float all[M16][N8][4];
  for_each_element(s, [&](float& x, int m, int n, int e) { all[m][n][e] = x; });
#pragma unroll 1
  for (int i = 0; i < M16 * N8 * 4; ++i) {
    const int m = i / (N8 * 4);
    const int n = i / 4 % N8;
    const int e = i % 4;
    float& x = all[m][n][e];
    const int column = 8 * n + e % 2;
    const int row = 2 * (lane % 4) + column;
    const bool exists = first_row + row < p.shape.seqlen_q;
    const int key = key_of(m, e / 2);
    if ((flags & lse_is_extreme) != 0 && !(fabsf(x * factor) < 1e37f) && exists &&
        key < p.shape.seqlen_k) {
      x = careful_probability<T, Pairs>(p, of.batch, of.head, of.kv_head, first_row + row, key);
    } else {
      x = exp2_approx(fmaf(x, factor, -lse2[column]) - (exists ? low[row] : 0.0f));
    }
    x = __saturatef(x);
  }
  for_each_element(s, [&](float& x, int m, int n, int e) { x = all[m][n][e]; });
}

}  // namespace flash_dmattn::cuda::sm80
