#pragma once

#include "cuda/attention/score.cuh"
#include "cuda/primitives/math.cuh"
#include "cuda/primitives/warp.cuh"

namespace flash_dmattn::cuda {

// P is scaled down by 2^weight_shift before it is divided by its sum. Weights of up to 2^-24 times values of up to
// 2^128 can be summed over any number of keys without overflow, and the weights stay far above bf16's smallest normal
// number. f16 has neither such a range below 1 nor such large values.
template <class T>
inline constexpr float weight_shift = 0;
template <>
inline constexpr float weight_shift<__nv_bfloat16> = 24;

// Biases beyond ± far_bias move the references of rows (OnlineSoftmax).
inline constexpr float far_bias = 1024;

// Computes the natural log sum exp of a row from the maximum in units of log 2, the sum of the weights, and the reference
// that the scores lack. The double contains both lse and lse_low.
template <class T>
__device__ inline double log_sum_exp(float max, float sum, float reference) {
  const double log2_sum = static_cast<double>(__log2f(sum)) + weight_shift<T>;
  return (static_cast<double>(max) + log2_sum) * 0.6931471805599453 +
         static_cast<double>(reference);
}

// The running maximum and sum of a lane's rows in a fragment, 2 for each m16 block. The four lanes that share a row
// have the same maximum; each keeps the sum of its own columns until the end. Scores of a call with biases of keys lack the
// row's reference, one of the biases that it sees, so that large ones that are close to each other keep their digits.
template <class T, int M16>
struct OnlineSoftmax {
  float max[M16][2];
  float sum[M16][2];
  float reference[M16][2];      // in the caller's units
  bool has_references = false;  // whether a reference of the warp's rows may differ from 0

  __device__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max[m][h] = negative_infinity;
        sum[m][h] = 0;
        reference[m][h] = 0;
      }
    }
  }

  // Turns the scores of a tile into weights 2^(factor s - factor max - shift) and adds them to `sum`. `max` is raised
  // only when a score exceeds it by max_growth in log2, which is rare after the first tiles. Otherwise nothing is
  // rescaled, and weights up to 2^max_growth are as precise as weights up to 1.
  template <int N8, int D8>
  __device__ void update(float (&s)[M16][N8][4], float factor, float (&out)[M16][D8][4]) {
    raise_max(s, factor, out);
    exponentiate(s, factor);
  }

  // Makes the largest bias that a row sees in a tile its reference if it exceeds the reference by far, or if it is the
  // row's first and far from 0. Scores are in units of log 2. s: the tile's scores without biases; -inf hides an element.
  // biases: of the keys from the lane's first column on.
  template <int N8>
  __device__ void raise_references(const float (&s)[M16][N8][4], const float* biases) {
    float largest[M16][2];
#pragma unroll
    for (int m = 0; m < M16; ++m) largest[m][0] = largest[m][1] = negative_infinity;
#pragma unroll
    for (int n = 0; n < N8; ++n) {
      const float2 bias = *reinterpret_cast<const float2*>(biases + 8 * n);
#pragma unroll
      for (int m = 0; m < M16; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& row = largest[m][e / 2];
          if (s[m][n][e] > negative_infinity) row = fmaxf(row, e % 2 == 0 ? bias.x : bias.y);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float row = quad_max(largest[m][h]);
        const float growth = row - reference[m][h];
        const bool is_first = max[m][h] == negative_infinity;
        if (!isfinite(growth) || !(growth > far_bias || (is_first && growth < -far_bias))) continue;
        reference[m][h] = row;
        max[m][h] -= growth * log2e;
      }
    }
    has_references = true;
  }

  // Makes the sum of a row NaN where a product q . k is not finite, even if its score becomes -inf or is limited by a
  // softcap. The epilogue recomputes such rows and tests which keys they see.
  template <int N8>
  __device__ void mark_nonfinite(const float (&products)[M16][N8][4]) {
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int n = 0; n < N8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[m][e / 2] = fmaf(products[m][n][e], 0.0f, sum[m][e / 2]);
      }
    }
  }

  __device__ void add_lanes() {
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[m][h] = quad_sum(sum[m][h]);
      }
    }
  }

  __device__ double log_sum_exp(int m, int h, float factor) const {
    return cuda::log_sum_exp<T>(max[m][h] * factor, sum[m][h], reference[m][h]);
  }

 private:
  static constexpr float max_growth = 8;  // log2

  // Raises the maxima of a warp and rescales `sum` and `out` if a score exceeds its maximum by max_growth. All lanes
  // vote, so that the lanes of a row need not share their maximum before.
  template <int N8, int D8>
  __device__ void raise_max(const float (&s)[M16][N8][4], float factor, float (&out)[M16][D8][4]) {
    float lane_max[M16][2];
    bool exceeded = false;
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = max[m][h];
#pragma unroll
        for (int n = 0; n < N8; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
        lane_max[m][h] = top;
        exceeded = exceeded || (top - max[m][h]) * factor > max_growth;
      }
    }
    if (warp_any(exceeded)) {
#pragma unroll
      for (int m = 0; m < M16; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float row_max = quad_max(lane_max[m][h]);
          const float rescale = exp2_approx(fmaf(max[m][h], factor, -offset_of(row_max, factor)));
          max[m][h] = row_max;
          sum[m][h] *= rescale;
#pragma unroll
          for (int d = 0; d < D8; ++d) {
            out[m][d][2 * h] *= rescale;
            out[m][d][2 * h + 1] *= rescale;
          }
        }
      }
    }
  }

  // Turns scores into weights, which are added to a lane's sums.
  template <int N8>
  __device__ void exponentiate(float (&s)[M16][N8][4], float factor) {
    float offsets[M16][2];
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) offsets[m][h] = offset_of(max[m][h], factor) + weight_shift<T>;
    }
    // Columns are the outer loop, so that the sums of the rows are independent chains of additions.
#pragma unroll
    for (int n = 0; n < N8; ++n) {
#pragma unroll
      for (int m = 0; m < M16; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[m][n][e] = exp2_approx(fmaf(s[m][n][e], factor, -offsets[m][e / 2]));
          sum[m][e / 2] += s[m][n][e];
        }
      }
    }
  }

  // A row that sees no key so far subtracts 0, never -inf from -inf.
  static __device__ float offset_of(float max, float factor) {
    return max == negative_infinity ? 0 : max * factor;
  }
};

}  // namespace flash_dmattn::cuda
