#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/params.h"

// What surrounds the backward's main loop: row statistics before it, the gradient of a bias after it.
namespace flash_dmattn::cuda {

// Element `index` of dbias, or added to it.
template <class T>
__device__ inline void store_gradient(const OutputBroadcast& dbias, std::int64_t index, float value,
                                      bool add, bool saturate) {
  constexpr float limit = 3.4028235e38f;
  auto* const floats = reinterpret_cast<float*>(dbias.data);
  if (add) {
    if (value != 0) atomicAdd(floats + index, value);
  } else if (dbias.f32) {
    floats[index] = saturate ? fmaxf(fminf(value, limit), -limit) : value;
  } else {
    reinterpret_cast<std::uint16_t*>(dbias.data)[index] =
        static_cast<std::uint16_t>(pack_gradient<T>(value, 0, saturate));
  }
}

// Elements `index` and the next, of a dbias that lies in_pairs.
template <class T>
__device__ inline void store_gradient_pair(const OutputBroadcast& dbias, std::int64_t index,
                                           float first, float second, bool saturate) {
  if (dbias.f32) {
    store_gradient<T>(dbias, index, first, false, saturate);
    store_gradient<T>(dbias, index + 1, second, false, saturate);
  } else {
    *reinterpret_cast<std::uint32_t*>(dbias.data + 2 * index) =
        pack_gradient<T>(first, second, saturate);
  }
}

// delta = dout . out and lse in units of log 2, for every query row. 16 lanes to a row.
template <class T>
struct RowStatisticsKernel {
  using Params = BackwardParams;
  struct SharedStorage {};
  static constexpr int threads = 256;
  static constexpr int min_blocks = 1;
  static constexpr int row_lanes = 16;

  static long blocks(const Params& p) {
    const long rows = static_cast<long>(p.shape.batch) * p.shape.heads_q * p.shape.seqlen_q;
    return (rows + threads / row_lanes - 1) / (threads / row_lanes);
  }

  __device__ void operator()(const Params& p, SharedStorage&) const {
    const int lane = static_cast<int>(threadIdx.x) % row_lanes;
    const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * (threads / row_lanes) +
                               static_cast<int>(threadIdx.x) / row_lanes;
    const std::int64_t rows =
        static_cast<std::int64_t>(p.shape.batch) * p.shape.heads_q * p.shape.seqlen_q;
    const bool exists = index < rows;
    float delta = 0;
    if (exists) {
      const std::int64_t row = index % p.shape.seqlen_q;
      const std::int64_t head = index / p.shape.seqlen_q % p.shape.heads_q;
      const std::int64_t batch = index / p.shape.seqlen_q / p.shape.heads_q;
      const T* out = row_of<T>(p.out, batch, row, head);
      const T* dout = row_of<T>(p.dout, batch, row, head);
      bool finite = true;
      for (int chunk = lane; chunk < p.shape.head_dim / 8; chunk += row_lanes) {
        T a[8];
        T b[8];
        load_chunk(a, out + chunk * 8, p.out.aligned);
        load_chunk(b, dout + chunk * 8, p.dout.aligned);
        for (int i = 0; i < 8; ++i) {
          const float gradient = Element<T>::widen(b[i]);
          if (isfinite(gradient) || !p.saturate) delta += gradient * Element<T>::widen(a[i]);
          finite = finite && isfinite(gradient);
        }
      }
      if (!finite) atomicOr(p.flags, dout_not_finite);
    }
    for (int step = 1; step < row_lanes; step *= 2) delta += shuffle_xor(delta, step);
    if (!exists || lane != 0) return;
    p.delta[index] = delta;
    const double low = p.lse_low == nullptr ? 0 : static_cast<double>(p.lse_low[index]);
    const double lse2 = (static_cast<double>(p.lse[index]) + low) * 1.4426950408889634;
    const bool empty = p.lse[index] == negative_infinity;
    const float limit = 3.4028235e38f;
    const float high =
        empty ? -negative_infinity : fmaxf(fminf(static_cast<float>(lse2), limit), -limit);
    p.lse2[index] = high;
    const float rest = empty ? 0 : static_cast<float>(lse2 - static_cast<double>(high));
    p.lse2_low[index] = rest;
    // Less changes a probability by less than bf16 can show.
    if (fabsf(rest) > 0x1p-12f) atomicOr(p.flags, lse_has_low);
    if (fabsf(p.lse[index]) > 1e30f && !empty) atomicOr(p.flags, lse_has_low | lse_is_extreme);
  }

 private:
  static __device__ void load_chunk(T (&to)[8], const T* from, bool aligned) {
    if (aligned) {
      *reinterpret_cast<uint4*>(to) = __ldg(reinterpret_cast<const uint4*>(from));
    } else {
      for (int i = 0; i < 8; ++i) to[i] = from[i];
    }
  }
};

// Strided elements of dbias: from dense fp32 sums of their shape, or zeros when there are none.
template <class T>
struct StoreBias {
  std::int64_t shape[4];
  std::int64_t stride[4];
  std::byte* to;
  const float* sums;  // dense; null: zeros
  bool f32;
  bool saturate;

  long items() const { return static_cast<long>(shape[0] * shape[1] * shape[2] * shape[3]); }

  __device__ void operator()(long item) const { store(item, sums == nullptr ? 0 : sums[item]); }

  __device__ void store(long item, float sum) const {
    std::int64_t rest = item;
    std::int64_t index = 0;
    for (int i = 3; i >= 0; --i) {
      index += rest % shape[i] * stride[i];
      rest /= shape[i];
    }
    if (f32) {
      const float limit = 3.4028235e38f;
      reinterpret_cast<float*>(to)[index] = saturate ? fmaxf(fminf(sum, limit), -limit) : sum;
    } else {
      reinterpret_cast<std::uint16_t*>(to)[index] =
          static_cast<std::uint16_t>(pack_gradient<T>(sum, 0, saturate));
    }
  }
};

// The same from sums of `parts` x the shape in each dimension, which a warp adds up for each element
// in a fixed order.
template <class T>
struct StoreSummedBias {
  StoreBias<T> whole;
  std::int64_t parts[4];

  long items() const { return whole.items() * 32; }

  __device__ void operator()(long item) const {
    const long element = item / 32;
    const long count = static_cast<long>(parts[0] * parts[1] * parts[2] * parts[3]);
    float sum = 0;
    for (long part = item % 32; part < count; part += 32) sum += whole.sums[index(element, part)];
    for (int step = 16; step > 0; step /= 2) sum += shuffle_xor(sum, step);
    if (item % 32 == 0) whole.store(element, sum);
  }

 private:
  // Where the sums have part `part` of an element.
  __device__ std::int64_t index(std::int64_t element, std::int64_t part) const {
    std::int64_t index = 0;
    std::int64_t stride = 1;
    for (int i = 3; i >= 0; --i) {
      index += (element % whole.shape[i] * parts[i] + part % parts[i]) * stride;
      stride *= whole.shape[i] * parts[i];
      element /= whole.shape[i];
      part /= parts[i];
    }
    return index;
  }
};

}  // namespace flash_dmattn::cuda
