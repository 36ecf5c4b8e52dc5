#pragma once

#include "cuda/common/careful.cuh"
#include "cuda/common/convert.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/params.h"

// dq where K is not finite. The main loops multiply whole tiles, so inf or NaN in a key meets the zeros of
// dS of all rows of a tile, also of those that do not see it. They leave a flag, and then such rows are
// computed again, in double, from the keys that they see.
//
// The kernel is launched behind every backward that wants dq and ends at once where the flag is not set. Where
// gradients overflow although all keys are finite, looking at the keys is all that it does.
namespace flash_dmattn::cuda {

// What is not finite in dout is not there, or is meant to reach dq.
__device__ inline bool may_blame_keys(const BackwardParams& p, std::uint32_t flags) {
  return (flags & dq_not_finite) != 0 && (p.saturate || (flags & dout_not_finite) == 0);
}

// Whether one of the lane's elements of a row is as large as the one with these bits, or NaN.
template <class T>
__device__ inline bool reaches(const T* row, int lane, int head_dim, std::uint32_t limit) {
  const auto* const elements = reinterpret_cast<const std::uint16_t*>(row);
  bool any = false;
  for (int d = lane; d < head_dim; d += 32) any = any || (elements[d] & 0x7fffu) >= limit;
  return any;
}

// The derivative by scale q . k of a pair. Zero where the row does not see the key.
template <class T>
__device__ __noinline__ double careful_dt(const BackwardParams& p, int batch, int head, int kv_head,
                                          int row, int key, double delta) {
  const float probability = careful_probability<T, true>(p, batch, head, kv_head, row, key);
  if (!(probability > 0)) return 0;
  const T* const dout = row_of<T>(p.dout, batch, row, head);
  const T* const value = row_of<T>(p.v, batch, key, kv_head);
  double dp = 0;
  for (int d = 0; d < p.shape.head_dim; ++d) {
    const float gradient = Element<T>::widen(dout[d]);
    if (isfinite(gradient) || !p.saturate) {
      dp += static_cast<double>(gradient) * static_cast<double>(Element<T>::widen(value[d]));
    }
  }
  double dt = static_cast<double>(fminf(probability, 1)) * (dp - delta);
  const double c = static_cast<double>(p.score.softcap);
  if (c > 0 && dt != 0) {
    const double t = tanh(static_cast<double>(p.score.scale) / c *
                          careful_dot(row_of<T>(p.q, batch, row, head),
                                      row_of<T>(p.k, batch, key, kv_head), p.shape.head_dim));
    dt *= 1 - t * t;
  }
  const auto limit = static_cast<double>(Element<T>::widen_pair(Element<T>::gradient_pair).x);
  return p.saturate ? fmax(fmin(dt, limit), -limit) : dt;
}

// Some blocks have the rows of a kv head, of which a warp computes one at a time.
template <class T>
struct CarefulQueriesKernel {
  using Params = BackwardParams;
  struct SharedStorage {};
  static constexpr int threads = 256;
  static constexpr int warps = threads / 32;
  static constexpr int min_blocks = 1;

  static long blocks(const Params& p) { return kv_heads(p) * parts(p); }

  __device__ void operator()(const Params& p, SharedStorage&) const {
    if (!may_blame_keys(p, *p.flags)) return;
    const int unit = static_cast<int>(blockIdx.x) / parts(p);
    const int part = static_cast<int>(blockIdx.x) % parts(p);
    const int batch = unit / p.shape.heads_kv;
    const int kv_head = unit % p.shape.heads_kv;
    const int lane = lane_id();
    const int warp = warp_id();
    bool any = false;
    for (int key = warp; key < p.shape.seqlen_k; key += warps) {
      any = any || reaches(row_of<T>(p.k, batch, key, kv_head), lane, p.shape.head_dim,
                           Element<T>::exponent_mask);
    }
    if (__syncthreads_or(any) == 0) return;
    const std::uint32_t suspect =
        p.saturate ? Element<T>::gradient_pair & 0x7fffu : Element<T>::exponent_mask;
    const int group = p.shape.heads_q / p.shape.heads_kv;
    for (int g = 0; g < group; ++g) {
      const int head = kv_head * group + g;
      for (int row = part * warps + warp; row < p.shape.seqlen_q; row += parts(p) * warps) {
        const bool hit =
            reaches(row_of<T>(p.dq, batch, row, head), lane, p.shape.head_dim, suspect);
        if (warp_any(hit)) make_row(p, batch, head, kv_head, row);
      }
    }
  }

 private:
  static __host__ __device__ int kv_heads(const Params& p) {
    return p.shape.batch * p.shape.heads_kv;
  }
  // Blocks of a kv head: two for each multiprocessor of a large GPU, together.
  static __host__ __device__ int parts(const Params& p) { return 264 / max(kv_heads(p), 1) + 1; }

  static __device__ void make_row(const Params& p, int batch, int head, int kv_head, int row) {
    const int lane = lane_id();
    const std::int64_t index =
        (static_cast<std::int64_t>(batch) * p.shape.heads_q + head) * p.shape.seqlen_q + row;
    const auto delta = static_cast<double>(p.delta[index]);
    const KeysOfRow keys(p, batch, kv_head, row);
    double sum[8] = {};  // columns lane + 32 c
    for (int begin = 0; begin < keys.count; begin += 32) {
      const int mine = begin + lane;
      const double dt =
          mine < keys.count ? careful_dt<T>(p, batch, head, kv_head, row, keys[mine], delta) : 0;
      for (int i = 0; i < 32 && begin + i < keys.count; ++i) {
        const double weight = shuffle(dt, i);
        if (weight == 0) continue;
        const T* const key = row_of<T>(p.k, batch, keys[begin + i], kv_head);
        for (int c = 0; lane + 32 * c < p.shape.head_dim; ++c) {
          sum[c] += weight * static_cast<double>(Element<T>::widen(key[lane + 32 * c]));
        }
      }
    }
    auto* const dq = reinterpret_cast<std::uint16_t*>(row_of<T>(p.dq, batch, row, head));
    for (int c = 0; lane + 32 * c < p.shape.head_dim; ++c) {
      const auto value = static_cast<float>(sum[c] * static_cast<double>(p.score.scale));
      dq[lane + 32 * c] = static_cast<std::uint16_t>(pack_gradient<T>(value, 0, p.saturate));
    }
  }
};

}  // namespace flash_dmattn::cuda
