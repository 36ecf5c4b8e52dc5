#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/nonfinite_rows.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/params.h"

namespace flash_dmattn::cuda {

// Before the backward's main loop: delta = dout . out and lse in units of log 2, for every query row, and the flags
// of what they found. 16 lanes to a row.
template <class T>
struct BwdPreprocessKernel {
  using Params = BackwardParams;
  struct SharedStorage {};
  static constexpr int threads = 256;
  static constexpr int min_blocks = 1;
  static constexpr int row_lanes = 16;
  static constexpr int block_rows = threads / row_lanes;

  static long blocks(const Params& p) { return static_cast<long>(ceil_div(rows(p), block_rows)); }

  __device__ void operator()(const Params& p, SharedStorage&) const {
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t index =
        static_cast<std::int64_t>(blockIdx.x) * block_rows + thread / row_lanes;
    const bool exists = index < rows(p);
    float delta = exists ? lane_delta(p, index, thread % row_lanes) : 0;
    for (int step = 1; step < row_lanes; step *= 2) delta += shuffle_xor(delta, step);
    if (!exists || thread % row_lanes != 0) return;
    p.delta[index] = delta;
    store_lse(p, index);
    if (!p.saturate && has_nonfinite_ds(p.lse[index], delta)) atomicOr(p.flags, row_not_finite);
  }

 private:
  static __host__ __device__ std::int64_t rows(const Params& p) {
    return static_cast<std::int64_t>(p.shape.batch) * p.shape.heads_q * p.shape.seqlen_q;
  }

  // A lane's part of dout . out of a row.
  static __device__ float lane_delta(const Params& p, std::int64_t index, int lane) {
    const std::int64_t row = index % p.shape.seqlen_q;
    const std::int64_t head = index / p.shape.seqlen_q % p.shape.heads_q;
    const std::int64_t batch = index / p.shape.seqlen_q / p.shape.heads_q;
    const T* out = row_of<T>(p.out, batch, row, head);
    const T* dout = row_of<T>(p.dout, batch, row, head);
    const T* q = row_of<T>(p.q, batch, row, head);
    float delta = 0;
    bool dout_finite = true;
    bool q_finite = true;
    for (int chunk = lane; chunk < p.shape.head_dim / 8; chunk += row_lanes) {
      T a[8];
      T b[8];
      load_chunk(a, out + chunk * 8, p.out.aligned);
      load_chunk(b, dout + chunk * 8, p.dout.aligned);
      for (int i = 0; i < 8; ++i) {
        const float gradient = Element<T>::widen(b[i]);
        if (isfinite(gradient) || !p.saturate) delta += gradient * Element<T>::widen(a[i]);
        dout_finite = dout_finite && isfinite(gradient);
      }
      if (p.saturate) continue;
      load_chunk(a, q + chunk * 8, p.q.aligned);
      for (int i = 0; i < 8; ++i) q_finite = q_finite && isfinite(Element<T>::widen(a[i]));
    }
    if (!dout_finite) atomicOr(p.flags, dout_not_finite);
    if (!q_finite) atomicOr(p.flags, q_not_finite);
    return delta;
  }

  // lse log2 e as the sum of two floats; +inf for a row that sees nothing, so that its P is 0, and for one without
  // P, which NonFiniteRowsKernel adds.
  static __device__ void store_lse(const Params& p, std::int64_t index) {
    const float lse = p.lse[index];
    const bool has_p = isfinite(lse);
    const double low = p.lse_low == nullptr ? 0 : static_cast<double>(p.lse_low[index]);
    const double lse_log2 = (static_cast<double>(lse) + low) * 1.4426950408889634;
    const float limit = 3.4028235e38f;
    const float high =
        has_p ? fmaxf(fminf(static_cast<float>(lse_log2), limit), -limit) : -negative_infinity;
    const float rest = has_p ? static_cast<float>(lse_log2 - static_cast<double>(high)) : 0;
    p.lse_log2[index] = high;
    p.lse_log2_low[index] = rest;
    // Less changes a probability by less than bf16 can show.
    if (fabsf(rest) > 0x1p-12f) atomicOr(p.flags, lse_has_low);
    // Scores of this magnitude may have overflowed on the way.
    if (fabsf(lse) > 1e30f && has_p) atomicOr(p.flags, lse_has_low | lse_is_extreme);
  }

  static __device__ void load_chunk(T (&to)[8], const T* from, bool aligned) {
    if (aligned) {
      *reinterpret_cast<uint4*>(to) = __ldg(reinterpret_cast<const uint4*>(from));
    } else {
      for (int i = 0; i < 8; ++i) to[i] = from[i];
    }
  }
};

}  // namespace flash_dmattn::cuda
