#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/rows.cuh"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/math.cuh"
#include "cuda/primitives/tile_copy.cuh"
#include "cuda/primitives/warp.cuh"
#include "cuda/stages/nonfinite_rows.cuh"

namespace flash_dmattn::cuda {

// Runs before the backward's main loop. It computes delta = dout . out - dlse and lse in units of log 2 for every query
// row, and sets flags. 16 lanes share a row. A thread has four rows of a head, so that their loads are in flight together,
// and head and batch element are computed once for all four.
template <class T>
struct BwdPreprocessKernel {
  using Params = BackwardParams;
  struct SharedStorage {};
  static constexpr int threads = 256;
  static constexpr int min_blocks = 3;
  static constexpr int row_lanes = 16;
  static constexpr int rows_at_once = threads / row_lanes;
  static constexpr int steps = 4;
  static constexpr int block_rows = rows_at_once * steps;

  static long blocks(const Params& p) {
    return long{p.shape.batch} * p.shape.heads_q * ceil_div(p.shape.seqlen_q, block_rows);
  }

  __device__ void operator()(const Params& p, SharedStorage&) const {
    const int tiles = ceil_div(p.shape.seqlen_q, block_rows);
    const int block = static_cast<int>(blockIdx.x);
    compute(p, block / tiles, block % tiles * block_rows);
  }

  // Whether rounding lse log2 e to a float changes P by more than 2^-12.
  static __device__ bool is_large_lse(float lse_log2) {
    return isfinite(lse_log2) && fabsf(lse_log2) > 8192;
  }

  // A thread's row, if it has one. A row past the end of a head sees nothing.
  struct Row {
    int row = -1;
    float2 lse_log2 = {-negative_infinity, 0};  // the sum of two floats
    float delta = 0;
  };

  // Computes block_rows rows, by all threads of a block.
  static __device__ Row compute(const Params& p, int head_index, int first_row) {
    const Shape& shape = p.shape;
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % row_lanes;
    const int batch = head_index / shape.heads_q;
    const int head = head_index % shape.heads_q;
    const int first = first_row + thread / row_lanes;

    // lse is loaded together with out and dout.
    const int row = first + lane * rows_at_once;
    const bool exists = lane < steps && row < shape.seqlen_q;
    const std::int64_t index = std::int64_t{head_index} * shape.seqlen_q + row;
    const float lse = exists ? p.lse[index] : 0;
    const float lse_low = exists && p.lse_low != nullptr ? p.lse_low[index] : 0;
    const float dlse = exists && p.dlse != nullptr ? p.dlse[index] : 0;

    float delta[steps] = {};
    // The loop exists in two copies, because conditional loads would be awaited one by one.
    const bool aligned = p.out.aligned && p.dout.aligned && p.q.aligned;
    aligned ? add_delta<true>(p, batch, head, first, lane, delta)
            : add_delta<false>(p, batch, head, first, lane, delta);
    float mine = 0;  // the sum of row `lane`
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      for (int step = 1; step < row_lanes; step *= 2) delta[i] += shuffle_xor(delta[i], step);
      if (lane == i) mine = delta[i];
    }
    if (lane >= steps) return {};
    if (!exists) return {.row = row};
    if (p.dlse != nullptr) mine = subtract_dlse(mine, dlse, p.saturate);
    p.delta[index] = mine;
    if (!p.saturate && has_nonfinite_ds(lse, mine)) atomicOr(p.flags, row_not_finite);
    const float2 lse_log2 = scaled_lse(lse, lse_low);
    store_lse(p, index, lse_log2);
    return {.row = row, .lse_log2 = lse_log2, .delta = mine};
  }

 private:
  static constexpr float largest_float = 3.4028235e38f;

  // Eight elements.
  struct Chunk {
    std::uint32_t words[4];
  };

  // A lane's part of dout . out for its rows. Rows past the end repeat the last row.
  template <bool Aligned>
  static __device__ void add_delta(const Params& p, int batch, int head, int first, int lane,
                                   float (&delta)[steps]) {
    const auto row = [&](int i) { return min(first + i * rows_at_once, p.shape.seqlen_q - 1); };
    bool dout_finite = true;
    bool q_finite = true;
    for (int chunk = lane; chunk < p.shape.value_dim / 8; chunk += row_lanes) {
      Chunk out[steps];
      Chunk dout[steps];
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        out[i] = load_chunk<Aligned>(row_of<T>(p.out, batch, row(i), head) + chunk * 8);
        dout[i] = load_chunk<Aligned>(row_of<T>(p.dout, batch, row(i), head) + chunk * 8);
      }
#pragma unroll
      for (int i = 0; i < steps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 value = Element<T>::widen_packed2(out[i].words[j]);
          const float2 gradient = Element<T>::widen_packed2(dout[i].words[j]);
          if (isfinite(gradient.x) || !p.saturate) delta[i] += gradient.x * value.x;
          if (isfinite(gradient.y) || !p.saturate) delta[i] += gradient.y * value.y;
          dout_finite = dout_finite && isfinite(gradient.x) && isfinite(gradient.y);
        }
      }
    }
    for (int chunk = lane; !p.saturate && chunk < p.shape.head_dim / 8; chunk += row_lanes) {
#pragma unroll 1
      for (int i = 0; i < steps; ++i) {
        const Chunk q = load_chunk<Aligned>(row_of<T>(p.q, batch, row(i), head) + chunk * 8);
        for (const std::uint32_t two : q.words) {
          const float2 x = Element<T>::widen_packed2(two);
          q_finite = q_finite && isfinite(x.x) && isfinite(x.y);
        }
      }
    }
    if (!dout_finite) atomicOr(p.flags, dout_not_finite);
    if (!q_finite) atomicOr(p.flags, q_not_finite);
  }

  // If gradients saturate, a dlse that is not finite counts as 0, like such an element of dout.
  static __device__ float subtract_dlse(float delta, float dlse, bool saturate) {
    if (!saturate) return delta - dlse;
    return isfinite(dlse) ? fmaxf(fminf(delta - dlse, largest_float), -largest_float) : delta;
  }

  // lse log2 e as the sum of two floats. It is +inf for a row that sees nothing, so that its P is 0, and for a row without
  // P, which NonFiniteRowsKernel adds.
  static __device__ float2 scaled_lse(float lse, float lse_low) {
    if (!isfinite(lse)) return {-negative_infinity, 0};
    constexpr float log2e_low = 1.92596299e-8f;  // log2 e is log2e + log2e_low
    const float high = fmaxf(fminf(lse * log2e, largest_float), -largest_float);
    const float rest = fmaf(lse, log2e, -high) + fmaf(lse, log2e_low, lse_low * log2e);
    return {high, isfinite(rest) ? rest : 0};
  }

  static __device__ void store_lse(const Params& p, std::int64_t index, float2 lse_log2) {
    if (is_large_lse(lse_log2.x)) atomicOr(p.flags, lse_is_large);
    if (p.lse_log2 == nullptr) return;
    p.lse_log2[index] = lse_log2.x;
    p.lse_log2_low[index] = lse_log2.y;
  }

  template <bool Aligned>
  static __device__ Chunk load_chunk(const T* from) {
    const uint4 all =
        Aligned ? __ldg(reinterpret_cast<const uint4*>(from)) : load_unaligned_chunk(from);
    return {{all.x, all.y, all.z, all.w}};
  }
};

}  // namespace flash_dmattn::cuda
