#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/float_types.h"
#include "common/tasks.h"

// The parts of a row of the reference: limits of the dtypes, rows of the tensors, and scores.
namespace flash_dmattn::reference {

constexpr std::int64_t max_head_dim = 256;
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

using HeadVector = double[max_head_dim];  // one row of q, dq, out or dout

// ---- Limits --------------------------------------------------------------------------------------

inline double largest(DType dtype) {
  switch (dtype) {
    case DType::f64: return std::numeric_limits<double>::max();
    case DType::f32: return 0x1.fffffep127;
    case DType::bf16: return 0x1.fep127;
    default: return 65504;
  }
}

inline double gradient_limit(DType dtype) {
  return dtype == DType::bf16 ? largest(dtype) / 2 : largest(dtype);
}

// The dtype of scores, lse and ds inside a computation in `dtype`.
inline DType softmax_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

// A NaN becomes the upper limit.
inline double saturated(double value, double limit) {
  return value < limit ? std::max(value, -limit) : limit;
}

// A NaN becomes the lower limit.
inline double clamped_score(double score, double limit) {
  return score > -limit ? std::min(score, limit) : -limit;
}

inline void store_limited(const Tensor4& tensor, DType dtype, NonFinite nonfinite, double limit,
                          std::int64_t offset, double value) {
  store(tensor.data, dtype, offset,
        nonfinite == NonFinite::saturate ? saturated(value, limit) : value);
}

// Whether a visible element adds nothing because its p underflowed.
inline bool multiplies_nothing(const Problem& p, double probability) {
  return probability == 0 && p.nonfinite == NonFinite::saturate;
}

// ---- Access --------------------------------------------------------------------------------------

inline std::int64_t offset_of(const std::array<std::int64_t, 4>& stride, std::int64_t i0,
                              std::int64_t i1, std::int64_t i2, std::int64_t i3 = 0) {
  return i0 * stride[0] + i1 * stride[1] + i2 * stride[2] + i3 * stride[3];
}

inline double dot(const double* a, const double* b, std::int64_t size) {
  double sum = 0;
  for (std::int64_t d = 0; d < size; ++d) sum += a[d] * b[d];
  return sum;
}

inline bool all_finite(const double* row, std::int64_t size) {
  return std::all_of(row, row + size, [](double x) { return std::isfinite(x); });
}

inline void load_row(const ConstTensor4& tensor, DType dtype, std::int64_t offset,
                     std::int64_t size, double* row) {
  for (std::int64_t d = 0; d < size; ++d) row[d] = load(tensor.data, dtype, offset + d);
}

// The rows of one (batch, kv head) of k or v, [Sk, dim].
inline void load_head(const Problem& p, const ConstTensor4& tensor, std::int64_t dim,
                      std::int64_t batch, std::int64_t head, double* rows) {
  for (std::int64_t j = 0; j < p.seqlen_k; ++j) {
    load_row(tensor, p.dtype, offset_of(tensor.stride, batch, j, head), dim, rows + j * dim);
  }
}

// ---- Scores --------------------------------------------------------------------------------------

struct Row {
  std::int64_t batch;
  std::int64_t head;     // of q
  std::int64_t kv_head;  // head / G
  std::int64_t query;
};

// The head index of a mask or a bias for a row, of a shape with Hq, Hkv or 1 heads.
inline std::int64_t broadcast_head(const Problem& p, const BroadcastShape& shape, const Row& row) {
  if (shape[1] == 1) return 0;
  return shape[1] == p.heads_q ? row.head : row.kv_head;
}

inline std::int64_t mask_offset(const Problem& p, const Inputs& in, const Row& row,
                                std::int64_t key) {
  return offset_of(in.mask.stride, row.batch, broadcast_head(p, p.mask_shape, row), row.query, key);
}

inline std::int64_t bias_offset(const Problem& p, const Inputs& in, const Row& row,
                                std::int64_t key) {
  return offset_of(in.bias.stride, row.batch, broadcast_head(p, p.bias_shape, row), row.query, key);
}

// vis_ij without the bias.
inline bool allowed(const Problem& p, const Inputs& in, const Row& row, std::int64_t key) {
  if (p.causal && key > row.query + p.seqlen_k - p.seqlen_q) return false;
  if (in.mask.data != nullptr &&
      static_cast<const std::uint8_t*>(in.mask.data)[mask_offset(p, in, row, key)] == 0) {
    return false;
  }
  const KeyIntervals& intervals = in.visibility.intervals;
  if (intervals.data == nullptr) return true;
  const KeyInterval interval =
      intervals
          .data[row.batch * intervals.stride_batch + row.kv_head * intervals.stride_head + key];
  return interval.first <= row.query && row.query < interval.last;
}

// Whether the delay of the bias, if there is one, has passed.
inline bool has_bias(const Problem& p, const Row& row, std::int64_t key) {
  return p.bias_delay == 0 || row.query + p.seqlen_k - p.seqlen_q - key >= p.bias_delay;
}

// scores[j] = s_ij, -inf where key j is not visible; slopes[j] = 1 - tanh^2(scale q_i . k_j / c), 1
// without softcap. Both [Sk].
inline void score_row(const Problem& p, const Inputs& in, const Row& row, const double* q,
                      const double* k, double* scores, double* slopes) {
  const double limit = largest(softmax_dtype(p.dtype));
  for (std::int64_t j = 0; j < p.seqlen_k; ++j) {
    scores[j] = -infinity;
    slopes[j] = 1;
    if (!allowed(p, in, row, j)) continue;
    double bias = 0;
    if (in.bias.data != nullptr && has_bias(p, row, j)) {
      bias = load(in.bias.data, p.bias_dtype, bias_offset(p, in, row, j));
      if (!(bias > mask_value(p.bias_dtype))) continue;
    }
    const double* const key = k + j * p.head_dim;
    double score = p.scale * dot(q, key, p.head_dim);
    // A product of finite f64 can overflow as well.
    const bool unknown =
        bias == infinity ||
        (!std::isfinite(score) && !(all_finite(q, p.head_dim) && all_finite(key, p.head_dim)));
    if (p.softcap > 0) {
      const double tanh = std::tanh(score / p.softcap);
      score = p.softcap * tanh;
      slopes[j] = 1 - tanh * tanh;
    }
    scores[j] = unknown && p.nonfinite == NonFinite::propagate ? not_a_number
                                                               : clamped_score(score + bias, limit);
  }
}

}  // namespace flash_dmattn::reference
