#pragma once

#include "cuda/common/rows.cuh"
#include "cuda/common/score.cuh"
#include "cuda/common/warp.cuh"

// Scores and rows in double, straight from the definition, for what overflows fp32. The main loops
// hand over the rows whose result is not finite or whose weights vanished, and the pairs whose
// score is not finite. Rare, so it is short rather than quick.
namespace flash_dmattn::cuda {

template <class T>
__device__ inline double careful_dot(const T* a, const T* b, int head_dim) {
  double dot = 0;
#pragma unroll 1  // registers that the main loops would have to leave to it
  for (int d = 0; d < head_dim; ++d) {
    dot +=
        static_cast<double>(Element<T>::widen(a[d])) * static_cast<double>(Element<T>::widen(b[d]));
  }
  return dot;
}

// The score of a pair in natural units; -inf where the key is not visible. `Pairs`: the mask or the bias may
// have a query dimension, and then there may be ranks.
template <class T, bool Pairs>
__device__ __noinline__ double careful_score(const ScoreParams& score, const Shape& shape,
                                             const InputRows& q, const InputRows& k, int batch,
                                             int head, int kv_head, int row, int key) {
  const double invisible = -__builtin_huge_val();
  const auto index = [&](const Broadcast& b) {
    return batch * b.batch + head * b.head_q + kv_head * b.head_kv + row * b.query + key * b.key;
  };
  if (Pairs && score.key_rank.data != nullptr &&
      reinterpret_cast<const std::int32_t*>(score.key_rank.data)[index(score.key_rank)] >=
          reinterpret_cast<const std::int32_t*>(score.rank_limit.data)[index(score.rank_limit)]) {
    return invisible;
  }
  if (score.causal && key > row + shape.seqlen_k - shape.seqlen_q) return invisible;
  if (score.mask.data != nullptr &&
      reinterpret_cast<const std::uint8_t*>(score.mask.data)[index(score.mask)] == 0) {
    return invisible;
  }
  if (score.intervals.data != nullptr) {
    const KeyInterval interval = score.intervals.data[batch * score.intervals.stride_batch +
                                                      kv_head * score.intervals.stride_head + key];
    if (row < interval.first || row >= interval.last) return invisible;
  }
  double bias = 0;
  if (score.bias.data != nullptr) {
    const float value = load_bias<T>(score.bias, index(score.bias));
    if (!(value > score.mask_value)) return invisible;
    bias = static_cast<double>(value);
  }
  const double dot = careful_dot(row_of<T>(q, batch, row, head), row_of<T>(k, batch, key, kv_head),
                                 shape.head_dim);
  double s = static_cast<double>(score.scale) * dot;
  const double c = static_cast<double>(score.softcap);
  if (c > 0) s = c * tanh(s / c);
  s += bias;
  const double limit = 3.4028234663852886e38;
  return s > -limit ? fmin(s, limit) : -limit;
}

// The probability of a pair, for the backward.
template <class T, bool Pairs>
__device__ __noinline__ float careful_probability(const BackwardParams& p, int batch, int head,
                                                  int kv_head, int row, int key) {
  const double score =
      careful_score<T, Pairs>(p.score, p.shape, p.q, p.k, batch, head, kv_head, row, key);
  const std::int64_t index =
      (static_cast<std::int64_t>(batch) * p.shape.heads_q + head) * p.shape.seqlen_q + row;
  const double low = p.lse_low == nullptr ? 0 : static_cast<double>(p.lse_low[index]);
  return static_cast<float>(exp((score - static_cast<double>(p.lse[index])) - low));
}

// The keys that a row may see: of its tile's list, where there is one.
struct KeysOfRow {
  const std::int32_t* listed = nullptr;
  int count;

  template <class Params>
  __device__ KeysOfRow(const Params& p, int batch, int kv_head, int row) : count(p.shape.seqlen_k) {
    if (p.plan.keys == nullptr) return;
    const std::int64_t tile = batch * p.plan.stride_batch + kv_head * p.plan.stride_head +
                              row / static_cast<int>(p.plan.tile_rows);
    listed = p.plan.keys + p.plan.begin[tile];
    count = p.plan.count[tile];
  }
  __device__ int operator[](int i) const { return listed == nullptr ? i : listed[i]; }
};

// The output and lse of a row, by one warp.
template <class T, bool Pairs>
__device__ __noinline__ void careful_row(const ForwardParams& p, int batch, int head, int kv_head,
                                         int row) {
  const int lane = lane_id();
  const double invisible = -__builtin_huge_val();
  const auto score = [&](int key) {
    return careful_score<T, Pairs>(p.score, p.shape, p.q, p.k, batch, head, kv_head, row, key);
  };
  double max = invisible;
  double sum = 0;
  const KeysOfRow keys(p, batch, kv_head, row);
  for (int i = lane; i < keys.count; i += 32) {
    const double s = score(keys[i]);
    if (s == invisible) continue;
    const double larger = fmax(max, s);
    sum = sum * exp(max - larger) + exp(s - larger);
    max = larger;
  }
  for (int step = 1; step < 32; step *= 2) {
    const double other_max = shuffle_xor(max, step);
    const double other_sum = shuffle_xor(sum, step);
    const double larger = fmax(max, other_max);
    if (larger == invisible) continue;
    sum = sum * exp(max - larger) + other_sum * exp(other_max - larger);
    max = larger;
  }
  const bool empty = !(sum > 0);

  double out[8] = {};  // columns lane + 32 i
  for (int begin = 0; begin < keys.count && !empty; begin += 32) {
    const int mine = begin + lane;
    const double weight = mine < keys.count ? exp(score(keys[mine]) - max) / sum : 0;
    for (int i = 0; i < 32 && begin + i < keys.count; ++i) {
      const double w = shuffle(weight, i);
      if (w == 0) continue;
      const T* v = row_of<T>(p.v, batch, keys[begin + i], kv_head);
      for (int c = 0; lane + 32 * c < p.shape.head_dim; ++c) {
        out[c] += w * static_cast<double>(Element<T>::widen(v[lane + 32 * c]));
      }
    }
  }

  auto* const to = reinterpret_cast<std::uint16_t*>(row_of<T>(p.out, batch, row, head));
  for (int c = 0; lane + 32 * c < p.shape.head_dim; ++c) {
    to[lane + 32 * c] =
        static_cast<std::uint16_t>(pack_output<T>(static_cast<float>(out[c]), 0, p.saturate));
  }
  if (lane != 0) return;
  const std::int64_t index =
      (static_cast<std::int64_t>(batch) * p.shape.heads_q + head) * p.shape.seqlen_q + row;
  const float lse = empty ? negative_infinity : static_cast<float>(max + log(sum));
  p.lse[index] = lse;
  if (p.lse_low != nullptr) {
    p.lse_low[index] = empty ? 0 : static_cast<float>((max - static_cast<double>(lse)) + log(sum));
  }
}

}  // namespace flash_dmattn::cuda
