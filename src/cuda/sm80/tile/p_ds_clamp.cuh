#pragma once

#include "cuda/attention/query_head.h"
#include "cuda/sm80/tile/fragment.cuh"

// Slow paths of the key-major backward, for P and dS that are not finite or out of range. The main loop only tests
// whether it needs them.
namespace flash_dmattn::cuda::sm80 {

// The address of the lane's 16 bytes of block (m, k) of an operand in shared memory, [M16][K16][32 lanes]. `words` is
// the address for block (0, 0).
template <int K16>
__device__ inline std::uint32_t transfer_address(std::uint32_t words, int m, int k) {
  return words + static_cast<std::uint32_t>((m * K16 + k) * warp_size * 16);
}

template <int M16, int K16>
__device__ inline void store_transfer_block(std::uint32_t words, int m, int k,
                                            const std::uint32_t (&operand)[M16][K16][4]) {
  store_shared_16(transfer_address<K16>(words, m, k),
                  {operand[m][k][0], operand[m][k][1], operand[m][k][2], operand[m][k][3]});
}

// Clamps P, in registers and in shared memory, to [0, 1]. NaN, from a score that overflowed far below the maximum,
// becomes 0. It is called if some P is 2 or more, negative or NaN; values between 1 and 2 come from rounding.
template <class T, int M16, int K16>
__device__ inline void clamp_p(std::uint32_t words, std::uint32_t (&p)[M16][K16][4]) {
#pragma unroll
  for (int m = 0; m < M16; ++m) {
#pragma unroll
    for (int k = 0; k < K16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[m][k][i] = saturate_packed2<T>(p[m][k][i]);
      store_transfer_block(words, m, k, p);
    }
  }
}

// Clamps dS to the limit of gradients if `saturate`; dS is 0 where P in shared memory is 0, even if dP is not finite.
template <class T, int M16, int K16>
__device__ inline void clamp_ds(std::uint32_t words, bool saturate,
                                std::uint32_t (&ds)[M16][K16][4]) {
  const auto zero = Element<T>::pack(0, 0);
#pragma unroll
  for (int m = 0; m < M16; ++m) {
#pragma unroll
    for (int k = 0; k < K16; ++k) {
      const uint4 block = load_shared_16(transfer_address<K16>(words, m, k));
      const std::uint32_t p[4] = {block.x, block.y, block.z, block.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto both = reinterpret_cast<const typename Element<T>::Packed2&>(p[i]);
        if (saturate)
          ds[m][k][i] = clamp_packed2<T>(ds[m][k][i], Element<T>::gradient_limit_packed2);
        ds[m][k][i] &= __hne2_mask(both, zero);
      }
    }
  }
}

// Computes P = exp2(factor s + log2 e bias - lse) of scores [keys, queries] in a call with a large lse, which is the sum of
// two floats. The difference of bias and lse is computed first, as it is exact where P is not small. `lse` has the
// values of the lane's columns of the tile, whose first query is first_row; `biases` has those of its rows, or is null.
template <int M16, int N8>
__device__ inline void compute_p_of_large_lse(const BackwardParams& p, QueryHead head,
                                              int first_row, const float* lse, const float* biases,
                                              float (&s)[M16][N8][4]) {
  const float factor = biases == nullptr ? p.score.final_log2_scale : p.score.factor;
  const float* const lse_low = p.lse_log2_low + head.row_index(p.shape, first_row);
#pragma unroll
  for (int n = 0; n < N8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 8 * n + e;  // relative to the lane's first column
      const int row = 2 * (lane_id() % 4) + column;
      const float low = first_row + row < p.shape.seqlen_q ? lse_low[row] : 0;
#pragma unroll
      for (int m = 0; m < M16; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& x = s[m][n][2 * h + e];
          const float bias = biases == nullptr ? 0 : biases[16 * m + 8 * h];
          const float rest = fmaf(bias, log2e_low, -low);
          x = __saturatef(exp2_approx(fmaf(x, factor, fmaf(bias, log2e, -lse[column])) + rest));
        }
      }
    }
  }
}

}  // namespace flash_dmattn::cuda::sm80
