#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "cuda/attention/params.h"
#include "cuda/primitives/integers.h"
#include "cuda/primitives/math.cuh"
#include "flash_dmattn/attention.h"

// Turns a problem and its tensors into the kernels' parameters.
namespace flash_dmattn::cuda {

inline Shape shape_of(const Problem& p) {
  const auto narrow = [](std::int64_t value) { return static_cast<int>(value); };
  return {narrow(p.batch),    narrow(p.heads_q),  narrow(p.heads_kv),     narrow(p.seqlen_q),
          narrow(p.seqlen_k), narrow(p.head_dim), narrow(value_dim_of(p))};
}

template <class Byte, class Tensor>
RowsView<Byte> rows_view(const Tensor& tensor) {
  RowsView<Byte> rows;
  rows.data = static_cast<Byte*>(tensor.data);
  rows.batch = tensor.stride[0] * 2;
  rows.row = tensor.stride[1] * 2;
  rows.head = tensor.stride[2] * 2;
  const auto address = reinterpret_cast<std::intptr_t>(tensor.data);
  rows.aligned = (address | rows.batch | rows.row | rows.head) % 16 == 0 &&
                 std::abs(rows.row) <= std::numeric_limits<std::int32_t>::max();
  rows.row_step = static_cast<int>(rows.row);
  return rows;
}
inline InputRows rows_of(const ConstTensor4& tensor) { return rows_view<const std::byte>(tensor); }
inline OutputRows rows_of(const Tensor4& tensor) { return rows_view<std::byte>(tensor); }

inline bool has(const BroadcastShape& shape) { return shape != BroadcastShape{}; }

inline std::int64_t elements(const BroadcastShape& shape) {
  return shape[0] * shape[1] * shape[2] * shape[3];
}

// `Data` is void or const void.
template <class Data>
auto broadcast_of(const Problem& p, const BroadcastShape& shape, Data* data,
                  const std::array<std::int64_t, 4>& stride, std::int64_t element_bytes) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const std::byte, std::byte>;
  const bool f32 = element_bytes == 4;
  BroadcastView<Byte> b;
  if (!has(shape) || data == nullptr) return b;
  const auto step = [&](std::size_t i) { return shape[i] == 1 ? 0 : stride[i]; };
  b.data = static_cast<Byte*>(data);
  b.batch = step(0);
  (shape[1] == p.heads_q ? b.head_q : b.head_kv) = step(1);
  b.query = step(2);
  b.key = step(3);
  b.dense = shape[2] > 1;
  b.f32 = f32;
  const auto address = reinterpret_cast<std::intptr_t>(data);
  const std::int64_t steps = b.batch | b.head_q | b.head_kv | b.query;
  b.aligned_x2 = b.key == 1 && steps % 2 == 0 && address % (2 * element_bytes) == 0;
  b.aligned_x4 = b.key == 1 && steps % 4 == 0 && address % (4 * element_bytes) == 0 &&
                 std::abs(b.query) <= std::numeric_limits<std::int32_t>::max() / 2;
  b.aligned_16B = b.key == 1 && steps * element_bytes % 16 == 0 && address % 16 == 0 && !f32;
  return b;
}

inline ScoreParams score_of(const Problem& p, const Inputs& in) {
  ScoreParams score;
  const auto scale = static_cast<float>(p.scale);
  const auto softcap = static_cast<float>(p.softcap);
  score.scale = scale;
  score.softcap = softcap;
  if (softcap > 0) {
    score.form = ScoreForm::capped;
    score.inner = 2 * log2e * scale / softcap;
    score.factor = softcap * log2e;
  } else if (scale > 0) {
    score.factor = scale * log2e;
  } else {
    score.form = ScoreForm::nonpositive_scale;
    score.inner = scale * log2e;
    score.factor = 1;
  }
  score.dense_factor = softcap > 0 ? softcap : scale > 0 ? scale : 1 / log2e;
  score.mask_value = static_cast<float>(mask_value(p.bias_dtype));
  score.mask = broadcast_of(p, p.mask_shape, in.mask.data, in.mask.stride, 1);
  score.bias = broadcast_of(p, p.bias_shape, in.bias.data, in.bias.stride, size_of(p.bias_dtype));
  score.final_log2_scale = score.bias.data == nullptr ? score.factor : score.bias.dense ? log2e : 1;
  score.intervals = in.visibility.intervals;
  score.causal = p.causal;
  score.bias_delay = static_cast<int>(std::min(p.bias_delay, p.seqlen_k));
  return score;
}

// The reason why kernels whose query tiles have at least `min_tile_rows` rows do not compute tensors of these dtypes and
// shapes; "" if they do.
inline std::string decline_shape(const Problem& p, std::int64_t min_tile_rows) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "it computes in bf16 and f16";
  if (p.head_dim % 8 != 0) return "it needs a head_dim that is a multiple of 8";
  if (value_dim_of(p) % 8 != 0) return "it needs a value_dim that is a multiple of 8";
  const std::int64_t tiles = p.batch * p.heads_q * ceil_div(p.seqlen_q, min_tile_rows);
  if (std::max({p.seqlen_q, p.seqlen_k, tiles}) > std::numeric_limits<std::int32_t>::max() / 2) {
    return "it has at most 2^30 - 1 queries, keys, and tiles of " + std::to_string(min_tile_rows) +
           " queries in all heads";
  }
  return "";
}

// Whether a mask or a bias is dense, that is, has a query dimension.
inline bool is_dense(const BroadcastShape& shape) { return has(shape) && shape[2] > 1; }

}  // namespace flash_dmattn::cuda
