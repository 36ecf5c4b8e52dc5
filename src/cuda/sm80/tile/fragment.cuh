#pragma once

#include "cuda/attention/score.cuh"
#include "cuda/primitives/ptx.cuh"
#include "cuda/primitives/warp.cuh"
#include "cuda/sm80/tile/key_info.cuh"
#include "cuda/sm80/tile/row_order.cuh"

// A fragment is a warp's part of a matrix in fp32 registers, float[m16][n8][4]. Element (m, n, e) of lane l is row
// 16 m + 8 (e / 2) + l / 4 and column 8 n + 2 (l % 4) + e % 2. It is the accumulator layout of mma.m16n8k16 and,
// with one m16, of a warp in a wgmma.
namespace flash_dmattn::cuda {

// The fragment of a warp's M x N part.
template <int M, int N>
using Accumulator = float[M / 16][N / 8][4];

// Blocks [Begin, End) of c's columns.
template <int Begin, int End, int M8, int N8>
__device__ inline void clear_columns(float (&c)[M8][N8][4]) {
#pragma unroll
  for (int m = 0; m < M8; ++m) {
#pragma unroll
    for (int n = Begin; n < End; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) c[m][n][e] = 0;
    }
  }
}

template <int M8, int N8>
__device__ inline void clear(float (&c)[M8][N8][4]) {
  clear_columns<0, N8>(c);
}

// The steps of a score policy on fragments of [queries, keys].

struct LanePosition {
  int row;     // query of element (0, 0, 0)
  int column;  // its column in the key tile

  // The position in a warp whose fragment begins at query `warp_row`, column `warp_column`.
  static __device__ LanePosition of(int warp_row, int warp_column) {
    const int lane = lane_id();
    return {warp_row + lane / 4, warp_column + 2 * (lane % 4)};
  }
};

// Calls body(element, m, n, e).
template <int M16, int N8, class Body>
__device__ inline void for_each_element(float (&x)[M16][N8][4], const Body& body) {
#pragma unroll
  for (int m = 0; m < M16; ++m) {
#pragma unroll
    for (int n = 0; n < N8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) body(x[m][n][e], m, n, e);
    }
  }
}

// Applies the steps before the bias: the softcap, or a scale that is not positive.
template <int M16, int N8>
__device__ inline void shape_scores(const ScoreParams& score, float (&x)[M16][N8][4]) {
  if (score.form == ScoreForm::product) return;
  if (score.form == ScoreForm::capped) {
    for_each_element(x, [&](float& s, int, int, int) { s = tanh_from_log2(s * score.inner); });
  } else {
    for_each_element(x, [&](float& s, int, int, int) { s *= score.inner; });
  }
}

// x = factor x + log2 e bias of the key. biases: from the lane's first column on.
template <int M16, int N8>
__device__ inline void add_column_bias(float factor, const float* biases, float (&x)[M16][N8][4]) {
#pragma unroll
  for (int n = 0; n < N8; ++n) {
    float2 bias = *reinterpret_cast<const float2*>(biases + 8 * n);
    bias = {bias.x * log2e, bias.y * log2e};
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        x[m][n][e] = fmaf(x[m][n][e], factor, e % 2 == 0 ? bias.x : bias.y);
    }
  }
}

// x = factor x + log2 e (bias of the key - reference of the row).
template <int M16, int N8>
__device__ inline void add_column_bias(float factor, const float* biases,
                                       const float (&reference)[M16][2], float (&x)[M16][N8][4]) {
#pragma unroll
  for (int n = 0; n < N8; ++n) {
    const float2 bias = *reinterpret_cast<const float2*>(biases + 8 * n);
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float difference = (e % 2 == 0 ? bias.x : bias.y) - reference[m][e / 2];
        x[m][n][e] = fmaf(x[m][n][e], factor, difference * log2e);
      }
    }
  }
}

// x = factor x + log2 e (bias of the key, from the query on where it counts, - reference). begin_of(column) is the first
// query for which the bias of a column counts; reference_of(m, h) and query_of(m, h) belong to the lane's row
// 16 m + 8 h; `column` is the lane's first. Hoisted together, the loads would spill registers.
template <int M16, int N8, class KeyInfo, class ReferenceOf, class BeginOf, class QueryOf>
__device__ inline void add_delayed_column_bias(float factor, const KeyInfo& key_info,
                                               const ReferenceOf& reference_of, int column,
                                               const BeginOf& begin_of, const QueryOf& query_of,
                                               float (&x)[M16][N8][4]) {
#pragma unroll
  for (int n = 0; n < N8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int c = column + 8 * n + e;
      const float key_bias = key_info.bias[c];
      const int begin = begin_of(c);
#pragma unroll
      for (int m = 0; m < M16; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& s = x[m][n][2 * h + e];
          const float bias = query_of(m, h) >= begin ? key_bias : 0.0f;
          s = bias == negative_infinity ? bias
                                        : fmaf(s, factor, (bias - reference_of(m, h)) * log2e);
        }
      }
      compiler_fence();
    }
  }
}

// Sets x to -inf where query_of(m, h), the query of the lane's row 16 m + 8 h, does not see the key. `column` is the
// lane's first.
template <int M16, int N8, class KeyInfo, class QueryOf>
__device__ inline void mask_columns(const KeyInfo& key_info, int column, const QueryOf& query_of,
                                    float (&x)[M16][N8][4]) {
#pragma unroll
  for (int n = 0; n < N8; ++n) {
    const int4 two = *reinterpret_cast<const int4*>(&key_info.range[column + 8 * n]);
    const QueryRange range[2] = {{two.x, two.y}, {two.z, two.w}};
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!range[e % 2].sees(query_of(m, e / 2))) x[m][n][e] = negative_infinity;
      }
    }
  }
}

template <class Order = RowOrder<1>, int M16, int N8, class KeyInfo>
__device__ inline void mask_columns(const KeyInfo& key_info, LanePosition position,
                                    float (&x)[M16][N8][4]) {
  mask_columns(
      key_info, position.column,
      [&](int m, int h) { return position.row + Order::query(16 * m + 8 * h); }, x);
}

// Packs a fragment to 16 bits, as an A operand of a product over its columns.
template <class T, int M16, int N8>
__device__ inline void pack_operand(const float (&x)[M16][N8][4],
                                    std::uint32_t (&packed)[M16][N8 / 2][4]) {
#pragma unroll
  for (int m = 0; m < M16; ++m) {
#pragma unroll
    for (int k = 0; k < N8 / 2; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&four)[4] = x[m][2 * k + i / 2];
        packed[m][k][i] = pack<T>(four[2 * (i % 2)], four[2 * (i % 2) + 1]);
      }
    }
  }
}

}  // namespace flash_dmattn::cuda
