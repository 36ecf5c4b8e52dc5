#pragma once

#include "cuda/attention/query_head.h"
#include "cuda/attention/rows.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/primitives/warp.cuh"

// Computes a row of the output key by key, straight from the definition. The main loops call it for rows whose sums
// fp32 cannot hold, or that a hidden inf or NaN of V has reached. Such rows are rare, so the code is short, not fast.
namespace flash_dmattn::cuda {

template <class T>
__device__ inline float dot_product(const T* a, const T* b, int head_dim) {
  float dot = 0;
#pragma unroll 1  // an unrolled loop takes registers from the main loops
  for (int d = 0; d < head_dim; ++d)
    dot = fmaf(Element<T>::widen(a[d]), Element<T>::widen(b[d]), dot);
  return dot;
}

// Whether a query sees a key. With `HasDense`, the mask or the bias may have a query dimension.
template <class T, bool HasDense>
__device__ __noinline__ bool is_visible(const ScoreParams& score, const Shape& shape,
                                        QueryHead head, int row, int key) {
  const auto index = [&](const Broadcast& b) { return head.element(b, row, key); };
  if (score.causal && key > row + shape.seqlen_k - shape.seqlen_q) return false;
  if (score.mask.data != nullptr &&
      reinterpret_cast<const std::uint8_t*>(score.mask.data)[index(score.mask)] == 0) {
    return false;
  }
  if (score.intervals.data != nullptr) {
    const KeyInterval interval =
        score.intervals.data[head.batch * score.intervals.stride_batch +
                             head.kv_head * score.intervals.stride_head + key];
    if (row < interval.first || row >= interval.last) return false;
  }
  return !has_bias(score, shape, row, key) ||
         load_bias<T>(score.bias, index(score.bias)) > score.mask_value;
}

// The score of a query and a key that it sees, in natural units. With `saturate` it is finite: NaN becomes the lower
// end of fp32. Without, it is NaN if the product or the score is not finite.
template <class T>
__device__ __noinline__ float visible_score(const ScoreParams& score, const Shape& shape,
                                            const InputRows& q, const InputRows& k, bool saturate,
                                            QueryHead head, int row, int key) {
  const float dot = dot_product(row_of<T>(q, head.batch, row, head.head),
                                row_of<T>(k, head.batch, key, head.kv_head), shape.head_dim);
  float s = score.scale * dot;
  if (score.softcap > 0) s = score.softcap * tanhf(s / score.softcap);
  if (has_bias(score, shape, row, key))
    s += load_bias<T>(score.bias, head.element(score.bias, row, key));
  if (!saturate && !(isfinite(dot) && isfinite(s))) return __int_as_float(0x7fffffff);
  constexpr float limit = 3.4028235e38f;
  return s > -limit ? fminf(s, limit) : -limit;
}

// The keys that `rows` rows of a tile may see: the keys of the tile's list if there is one, otherwise the keys that
// causality admits. A row that sees no key tests all of them.
struct KeysOfRows {
  const std::int32_t* listed = nullptr;
  int count;

  template <class Params>
  __device__ KeysOfRows(const Params& p, QueryHead head, int row, int rows = 1)
      : count(p.shape.seqlen_k) {
    if (p.tile_lists.keys == nullptr) {
      const int past = row + rows + p.shape.seqlen_k - p.shape.seqlen_q;
      if (p.score.causal) count = max(min(past, count), 0);
      return;
    }
    const std::int64_t tile = head.batch * p.tile_lists.stride_batch +
                              head.kv_head * p.tile_lists.stride_head +
                              row / static_cast<int>(p.tile_lists.tile_rows);
    listed = p.tile_lists.keys + p.tile_lists.begin[tile];
    count = p.tile_lists.count[tile];
  }
  __device__ int operator[](int i) const { return listed == nullptr ? i : listed[i]; }
};

// Keys that are all present, in the row of their query.
struct AllKeys {
  __device__ bool operator()(int) const { return true; }
  __device__ void move_to_row(const ForwardParams&) const {}
};

// Computes the output and lse of a row with one warp. Without `saturate`, inf and NaN in the inputs of keys that the
// row sees propagate to both.
template <class T, bool HasDense, class Present = AllKeys>
__device__ __noinline__ void recompute_row(const ForwardParams& p, QueryHead head, int row,
                                           Present present = {}) {
  const int lane = lane_id();
  constexpr float nothing = negative_infinity;
  const auto visible = [&](int key) {
    return present(key) && is_visible<T, HasDense>(p.score, p.shape, head, row, key);
  };
  const auto score = [&](int key) {
    return visible_score<T>(p.score, p.shape, p.q, p.k, p.saturate, head, row, key);
  };
  float max = nothing;
  float sum = 0;
  bool empty = true;
  const KeysOfRows keys(p, head, row);
  for (int i = lane; i < keys.count; i += warp_size) {
    if (!visible(keys[i])) continue;
    empty = false;
    const float s = score(keys[i]);
    const float larger = fmaxf(max, s);
    sum = sum * expf(max - larger) + expf(s - larger);
    max = larger;
  }
  empty = warp_all(empty);
  const bool undefined = warp_any(isnan(sum));
  for (int step = 1; step < warp_size; step *= 2) {
    const float other_max = shuffle_xor(max, step);
    const float other_sum = shuffle_xor(sum, step);
    const float larger = fmaxf(max, other_max);
    if (larger == nothing) continue;
    sum = sum * expf(max - larger) + other_sum * expf(other_max - larger);
    max = larger;
  }
  if (undefined) sum = __int_as_float(0x7fffffff);

  float out[8] = {};  // columns lane + 32 i
  for (int begin = 0; begin < keys.count && !empty; begin += warp_size) {
    const int mine = begin + lane;
    const bool sees = mine < keys.count && visible(keys[mine]);
    const float weight = sees ? expf(score(keys[mine]) - max) / sum : 0;
    unsigned left = warp_ballot(sees && (weight != 0 || !p.saturate));
    for (; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const float w = shuffle(weight, i);
      const T* v = row_of<T>(p.v, head.batch, keys[begin + i], head.kv_head);
      for (int c = 0; lane + warp_size * c < p.shape.value_dim; ++c)
        out[c] += w * Element<T>::widen(v[lane + warp_size * c]);
    }
  }

  auto* const to = reinterpret_cast<std::uint16_t*>(row_of<T>(p.out, head.batch, row, head.head));
  for (int c = 0; lane + warp_size * c < p.shape.value_dim; ++c) {
    to[lane + warp_size * c] = static_cast<std::uint16_t>(pack_output<T>(out[c], 0, p.saturate));
  }
  if (lane != 0) return;
  const std::int64_t index = head.row_index(p.shape, row);
  const float lse = empty ? negative_infinity : max + logf(sum);
  p.lse[index] = lse;
  if (p.lse_low != nullptr) {
    p.lse_low[index] = empty ? 0 : (max - lse) + logf(sum);
  }
}

}  // namespace flash_dmattn::cuda
