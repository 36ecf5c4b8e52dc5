#pragma once

#include "cuda/attention/rows.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/primitives/warp.cuh"

// Computes scores and rows in double, directly from the definition, for numbers that overflow fp32. The main loops
// call it for rows whose result is not finite or whose sum is 0, and for scores that are not finite. This is rare, so
// the code is short rather than fast.
namespace flash_dmattn::cuda {

struct QueryHead {
  int batch;
  int head;
  int kv_head;

  // The index of a row in [B, Hq, Sq].
  __device__ std::int64_t row_index(const Shape& shape, int row) const {
    return (static_cast<std::int64_t>(batch) * shape.heads_q + head) * shape.seqlen_q + row;
  }
  template <class View>
  __device__ std::int64_t element(const View& b, std::int64_t row, std::int64_t key) const {
    return b.begin(batch, head, kv_head) + row * b.query + key * b.key;
  }
};

// Head `index` of [B, Hq].
__device__ inline QueryHead query_head(const Shape& shape, int index) {
  const int head = index % shape.heads_q;
  return {index / shape.heads_q, head, head / shape.group_heads()};
}

template <class T>
__device__ inline double fp64_dot(const T* a, const T* b, int head_dim) {
  double dot = 0;
#pragma unroll 1  // an unrolled loop takes registers from the main loops
  for (int d = 0; d < head_dim; ++d) {
    dot +=
        static_cast<double>(Element<T>::widen(a[d])) * static_cast<double>(Element<T>::widen(b[d]));
  }
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

// The score of a query and a key that it sees, in natural units, limited to the range of fp32 like lse. Without
// `saturate` it is NaN if it depends on inf or NaN in q, k or the bias.
template <class T>
__device__ __noinline__ double fp64_score(const ScoreParams& score, const Shape& shape,
                                          const InputRows& q, const InputRows& k, bool saturate,
                                          QueryHead head, int row, int key) {
  const double dot = fp64_dot(row_of<T>(q, head.batch, row, head.head),
                              row_of<T>(k, head.batch, key, head.kv_head), shape.head_dim);
  double s = static_cast<double>(score.scale) * dot;
  const double c = static_cast<double>(score.softcap);
  if (c > 0) s = c * tanh(s / c);
  if (has_bias(score, shape, row, key))
    s += static_cast<double>(load_bias<T>(score.bias, head.element(score.bias, row, key)));
  if (!saturate && !(isfinite(dot) && isfinite(s))) return __builtin_nan("");
  const double limit = 3.4028234663852886e38;
  return s > -limit ? fmin(s, limit) : -limit;
}

// P of a query and a key, for the backward.
template <class T, bool HasDense>
__device__ __noinline__ float fp64_probability(const BackwardParams& p, QueryHead head, int row,
                                               int key) {
  if (!is_visible<T, HasDense>(p.score, p.shape, head, row, key)) return 0;
  const double score = fp64_score<T>(p.score, p.shape, p.q, p.k, p.saturate, head, row, key);
  const std::int64_t index = head.row_index(p.shape, row);
  const double low = p.lse_low == nullptr ? 0 : static_cast<double>(p.lse_low[index]);
  return static_cast<float>(exp((score - static_cast<double>(p.lse[index])) - low));
}

// P = exp2(factor s - lse), where lse is the sum of two floats. With `may_overflow`, P is computed in double if s or a
// partial sum of it may have overflowed fp32.
template <class T, bool HasDense>
__device__ inline float probability_with_fallback(const BackwardParams& p, QueryHead head, int row,
                                                  int key, bool may_overflow, float s, float lse,
                                                  float lse_low) {
  constexpr float safe_score =
      1e37f;  // a dot product below it had no partial sum above fp32's maximum
  const float factor = p.score.final_log2_scale;
  if (may_overflow && !(fabsf(s * factor) < safe_score))
    return fp64_probability<T, HasDense>(p, head, row, key);
  return exp2_approx(fmaf(s, factor, -lse) - lse_low);
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
__device__ __noinline__ void fp64_row(const ForwardParams& p, QueryHead head, int row,
                                      Present present = {}) {
  const int lane = lane_id();
  const double nothing = -__builtin_huge_val();
  const auto visible = [&](int key) {
    return present(key) && is_visible<T, HasDense>(p.score, p.shape, head, row, key);
  };
  const auto score = [&](int key) {
    return fp64_score<T>(p.score, p.shape, p.q, p.k, p.saturate, head, row, key);
  };
  double max = nothing;
  double sum = 0;
  bool empty = true;
  const KeysOfRows keys(p, head, row);
  for (int i = lane; i < keys.count; i += warp_size) {
    if (!visible(keys[i])) continue;
    empty = false;
    const double s = score(keys[i]);
    const double larger = fmax(max, s);
    sum = sum * exp(max - larger) + exp(s - larger);
    max = larger;
  }
  empty = warp_all(empty);
  const bool undefined = warp_any(isnan(sum));
  for (int step = 1; step < warp_size; step *= 2) {
    const double other_max = shuffle_xor(max, step);
    const double other_sum = shuffle_xor(sum, step);
    const double larger = fmax(max, other_max);
    if (larger == nothing) continue;
    sum = sum * exp(max - larger) + other_sum * exp(other_max - larger);
    max = larger;
  }
  if (undefined) sum = __builtin_nan("");

  double out[8] = {};  // columns lane + 32 i
  for (int begin = 0; begin < keys.count && !empty; begin += warp_size) {
    const int mine = begin + lane;
    const bool sees = mine < keys.count && visible(keys[mine]);
    const double weight = sees ? exp(score(keys[mine]) - max) / sum : 0;
    unsigned left = warp_ballot(sees && (weight != 0 || !p.saturate));
    for (; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const double w = shuffle(weight, i);
      const T* v = row_of<T>(p.v, head.batch, keys[begin + i], head.kv_head);
      for (int c = 0; lane + warp_size * c < p.shape.value_dim; ++c)
        out[c] += w * static_cast<double>(Element<T>::widen(v[lane + warp_size * c]));
    }
  }

  auto* const to = reinterpret_cast<std::uint16_t*>(row_of<T>(p.out, head.batch, row, head.head));
  for (int c = 0; lane + warp_size * c < p.shape.value_dim; ++c) {
    to[lane + warp_size * c] =
        static_cast<std::uint16_t>(pack_output<T>(static_cast<float>(out[c]), 0, p.saturate));
  }
  if (lane != 0) return;
  const std::int64_t index = head.row_index(p.shape, row);
  const float lse = empty ? negative_infinity : static_cast<float>(max + log(sum));
  p.lse[index] = lse;
  if (p.lse_low != nullptr) {
    p.lse_low[index] = empty ? 0 : static_cast<float>((max - static_cast<double>(lse)) + log(sum));
  }
}

}  // namespace flash_dmattn::cuda
