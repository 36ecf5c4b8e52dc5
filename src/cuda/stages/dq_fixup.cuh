#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/recomputed_row.cuh"
#include "cuda/primitives/convert.cuh"
#include "cuda/stages/nonfinite_rows.cuh"

// Corrects dq where K is not finite. The main loops multiply whole tiles, so inf or NaN in a key is multiplied by the
// zeros of dS of rows that do not see the key. The main loops then set a flag. If the flag is set, this kernel
// recomputes the rows from the keys that they see.
//
// It is launched after every backward that computes dq, and returns at once if the flag is not set. If gradients
// overflow although all keys are finite, it only reads the keys.
namespace flash_dmattn::cuda {

// Whether one of the lane's elements of a row is at least as large as the number with these bits, or NaN.
template <class T>
__device__ inline bool reaches(const T* row, int lane, int head_dim, std::uint32_t limit) {
  const auto* const elements = reinterpret_cast<const std::uint16_t*>(row);
  bool any = false;
  for (int d = lane; d < head_dim; d += warp_size) any = any || (elements[d] & 0x7fffu) >= limit;
  return any;
}

// The derivative with respect to scale q . k of a query and a key that it sees.
template <class T>
__device__ __noinline__ float visible_ds(const BackwardParams& p, QueryHead head, int row, int key,
                                         float delta) {
  const std::int64_t index = head.row_index(p.shape, row);
  const float score = visible_score<T>(p.score, p.shape, p.q, p.k, p.saturate, head, row, key);
  const float low = p.lse_low == nullptr ? 0 : p.lse_low[index];
  const float probability = expf((score - p.lse[index]) - low);
  if (!(probability > 0)) return 0;
  const T* const dout = row_of<T>(p.dout, head.batch, row, head.head);
  const T* const value = row_of<T>(p.v, head.batch, key, head.kv_head);
  float dp = 0;
  for (int d = 0; d < p.shape.value_dim; ++d) {
    const float gradient = Element<T>::widen(dout[d]);
    if (isfinite(gradient)) dp = fmaf(gradient, Element<T>::widen(value[d]), dp);
  }
  float ds = fminf(probability, 1) * (dp - delta);
  const float c = p.score.softcap;
  if (c > 0 && ds != 0) {
    const float t =
        tanhf(p.score.scale / c *
              dot_product(row_of<T>(p.q, head.batch, row, head.head),
                          row_of<T>(p.k, head.batch, key, head.kv_head), p.shape.head_dim));
    ds *= 1 - t * t;
  }
  const float limit = Element<T>::widen_packed2(Element<T>::gradient_limit_packed2).x;
  return p.saturate ? fmaxf(fminf(ds, limit), -limit) : ds;
}

// Computes dq of a row, with one warp, from the keys that it sees.
template <class T>
__device__ inline void recompute_dq_row(const BackwardParams& p, QueryHead head, int row) {
  const int lane = lane_id();
  const std::int64_t index = head.row_index(p.shape, row);
  if (!p.saturate && has_nonfinite_ds(p.lse[index], p.delta[index]))
    return;  // NonFiniteRowsKernel stores NaN
  const KeysOfRows keys(p, head, row);
  float sum[8] = {};  // columns lane + 32 c
  for (int begin = 0; begin < keys.count; begin += warp_size) {
    const int mine = begin + lane;
    const bool sees =
        mine < keys.count && is_visible<T, true>(p.score, p.shape, head, row, keys[mine]);
    const float ds = sees ? visible_ds<T>(p, head, row, keys[mine], p.delta[index]) : 0;
    unsigned left = warp_ballot(ds != 0);
    for (; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const float weight = shuffle(ds, i);
      const T* const key = row_of<T>(p.k, head.batch, keys[begin + i], head.kv_head);
      for (int c = 0; lane + warp_size * c < p.shape.head_dim; ++c)
        sum[c] = fmaf(weight, Element<T>::widen(key[lane + warp_size * c]), sum[c]);
    }
  }
  auto* const dq = reinterpret_cast<std::uint16_t*>(row_of<T>(p.dq, head.batch, row, head.head));
  for (int c = 0; lane + warp_size * c < p.shape.head_dim; ++c) {
    dq[lane + warp_size * c] =
        static_cast<std::uint16_t>(pack_gradient<T>(sum[c] * p.score.scale, 0, p.saturate));
  }
}

// parts() blocks share the rows of a kv head; a warp computes one row at a time.
template <class T>
struct DqFixupKernel {
  using Params = BackwardParams;
  struct SharedStorage {};
  static constexpr int threads = 256;
  static constexpr int warps = threads / warp_size;
  static constexpr int min_blocks = 1;

  static long blocks(const Params& p) { return kv_heads(p) * parts(p); }

  __device__ void operator()(const Params& p, SharedStorage&) const {
    if ((*p.flags & dq_not_finite) == 0) return;
    const int unit = static_cast<int>(blockIdx.x) / parts(p);
    const int part = static_cast<int>(blockIdx.x) % parts(p);
    const int batch = unit / p.shape.heads_kv;
    const int kv_head = unit % p.shape.heads_kv;
    bool any = false;
    for (int key = warp_id(); key < p.shape.seqlen_k; key += warps) {
      any = any || reaches(row_of<T>(p.k, batch, key, kv_head), lane_id(), p.shape.head_dim,
                           Element<T>::exponent_mask);
    }
    if (__syncthreads_or(any) == 0) return;
    const std::uint32_t suspect =
        p.saturate ? Element<T>::gradient_limit_packed2 & 0x7fffu : Element<T>::exponent_mask;
    const int group = p.shape.group_heads();
    for (int g = 0; g < group; ++g) {
      const QueryHead head{batch, kv_head * group + g, kv_head};
      for (int row = part * warps + warp_id(); row < p.shape.seqlen_q; row += parts(p) * warps) {
        const bool hit =
            reaches(row_of<T>(p.dq, batch, row, head.head), lane_id(), p.shape.head_dim, suspect);
        if (warp_any(hit)) recompute_dq_row<T>(p, head, row);
      }
    }
  }

 private:
  static __host__ __device__ int kv_heads(const Params& p) {
    return p.shape.batch * p.shape.heads_kv;
  }
  // The number of blocks of a kv head, in total two for each of the 132 multiprocessors of the largest GPU. One block
  // each would leave the GPU half empty while few rows are computed. More blocks take longer to return if the flag is
  // not set.
  static __host__ __device__ int parts(const Params& p) {
    constexpr int all_blocks = 2 * 132;
    return all_blocks / max(kv_heads(p), 1) + 1;
  }
};

}  // namespace flash_dmattn::cuda
