#include "validate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>

#include "arguments.h"
#include "flash_dmattn/error.h"

namespace flash_dmattn {
namespace {

using Shape4 = std::array<std::int64_t, 4>;

std::string text(float value) {
  std::ostringstream stream;
  stream << value;
  return stream.str();
}

template <std::size_t Size>
std::string text(const std::array<std::int64_t, Size>& values) {
  std::string result = "(";
  for (std::size_t i = 0; i < Size; ++i) {
    result += (i > 0 ? ", " : "") + std::to_string(values[i]);
  }
  return result + ")";
}

// "1", or "{size|1}".
std::string choice(std::initializer_list<std::int64_t> sizes) {
  std::string result;
  for (const std::int64_t size : sizes) result += std::to_string(size) + "|";
  return "{" + result + "1}";
}

template <std::size_t Size>
bool has_elements(const std::array<std::int64_t, Size>& shape) {
  return std::find(shape.begin(), shape.end(), 0) == shape.end();
}

template <std::size_t Size>
bool is_given(const std::array<std::int64_t, Size>& shape) {
  return shape != std::array<std::int64_t, Size>{};
}

// ---- Problem -------------------------------------------------------------------------------------

void check_broadcast_shape(std::string_view argument, const Problem& p,
                           const BroadcastShape& shape) {
  if (!is_given(shape)) return;
  const bool fits = (shape[0] == p.batch || shape[0] == 1) &&
                    (shape[1] == p.heads_q || shape[1] == p.heads_kv || shape[1] == 1) &&
                    (shape[2] == p.seqlen_q || shape[2] == 1) &&
                    (shape[3] == p.seqlen_k || shape[3] == 1);
  if (!fits) {
    throw InvalidArgument(argument, text(shape),
                          "(" + choice({p.batch}) + ", " + choice({p.heads_q, p.heads_kv}) + ", " +
                              choice({p.seqlen_q}) + ", " + choice({p.seqlen_k}) +
                              "), or all zero for none");
  }
  if (!product_fits({shape[0], shape[1], shape[2], shape[3]})) {
    throw InvalidArgument(argument, text(shape), "at most 2^56 elements");
  }
}

void check_bias_dtype(const Problem& p) {
  const bool fits =
      p.bias_dtype == p.dtype || (p.bias_dtype == DType::f32 && p.dtype != DType::f64);
  if (is_given(p.bias_shape) && !fits) {
    std::string expected(name_of(p.dtype));
    if (p.dtype == DType::bf16 || p.dtype == DType::f16) expected += " or f32";
    throw InvalidArgument("problem.bias_dtype", name_of(p.bias_dtype),
                          expected + " with problem.dtype " + std::string(name_of(p.dtype)));
  }
}

void check_rank_shapes(const Problem& p) {
  if (!is_given(p.rank_shape) && !is_given(p.limit_shape)) return;
  check_broadcast_shape("problem.rank_shape", p, p.rank_shape);
  check_broadcast_shape("problem.limit_shape", p, p.limit_shape);
  if (p.rank_shape[2] != 1 || p.rank_shape[3] != p.seqlen_k) {
    throw InvalidArgument("problem.rank_shape", text(p.rank_shape),
                          "one rank for each of " + std::to_string(p.seqlen_k) +
                              " keys, and problem.limit_shape with it");
  }
  if (p.limit_shape[2] != p.seqlen_q || p.limit_shape[3] != 1) {
    throw InvalidArgument("problem.limit_shape", text(p.limit_shape),
                          "one limit for each of " + std::to_string(p.seqlen_q) +
                              " queries, and problem.rank_shape with it");
  }
  if (!is_given(p.mask_shape) || is_given(p.intervals_shape)) {
    throw InvalidArgument("problem.rank_shape", text(p.rank_shape),
                          "ranks only with a mask and without intervals");
  }
}

// ---- Tensors -------------------------------------------------------------------------------------

void check_span(std::string_view argument, const ConstTensor4& tensor, const Shape4& shape) {
  std::int64_t room = max_elements;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] <= 1) continue;
    const std::int64_t most = room / (shape[i] - 1);
    if (tensor.stride[i] > most || tensor.stride[i] < -most) {
      throw InvalidArgument(argument,
                            "strides " + text(tensor.stride) + " for shape " + text(shape),
                            "a span of at most 2^56 elements");
    }
    room -= std::abs(tensor.stride[i]) * (shape[i] - 1);
  }
}

void check_input(std::string_view argument, const ConstTensor4& tensor, const Shape4& shape) {
  if (!has_elements(shape)) return;
  if (tensor.data == nullptr) {
    throw InvalidArgument(argument, "null data", "data of shape " + text(shape));
  }
  if (shape[3] > 1 && tensor.stride[3] != 1) {
    throw InvalidArgument(argument, "strides " + text(tensor.stride),
                          "a last dimension that is contiguous (stride 1)");
  }
  check_span(argument, tensor, shape);
}

void check_output(std::string_view argument, const Tensor4& tensor, const Shape4& shape) {
  check_input(argument, tensor, shape);
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (has_elements(shape) && shape[i] > 1 && tensor.stride[i] == 0) {
      throw InvalidArgument(argument,
                            "strides " + text(tensor.stride) + " for shape " + text(shape),
                            "an output whose elements do not overlap");
    }
  }
}

void check_gradient(std::string_view argument, const Tensor4& tensor, const Shape4& shape) {
  if (tensor.data != nullptr) check_output(argument, tensor, shape);
}

void check_absent(std::string_view argument, const void* data, std::string_view shape) {
  if (data != nullptr) {
    throw InvalidArgument(argument, "data",
                          "null data while " + std::string(shape) + " is all zero");
  }
}

Shape4 broadcast_strides(const Shape4& stride, const BroadcastShape& shape) {
  Shape4 result{};
  for (std::size_t i = 0; i < shape.size(); ++i) result[i] = shape[i] == 1 ? 0 : stride[i];
  return result;
}

ConstTensor4 validated_broadcast(std::string_view argument, const ConstTensor4& tensor,
                                 std::string_view shape_argument, const BroadcastShape& shape) {
  if (!is_given(shape)) {
    check_absent(argument, tensor.data, shape_argument);
    return {};
  }
  check_input(argument, tensor, shape);
  return {tensor.data, broadcast_strides(tensor.stride, shape)};
}

// ---- Intervals and plan --------------------------------------------------------------------------

// Without queries or keys a plan may have no tiles and point nowhere.
bool is_given(const Plan& plan) { return plan.tile_rows != 0 || plan.begin != nullptr; }

KeyIntervals validated_intervals(const Problem& p, const Inputs& in, const Backend& backend) {
  const KeyIntervals& intervals = in.intervals;
  const auto [batch, heads] = p.intervals_shape;
  if (!is_given(p.intervals_shape)) {
    check_absent("intervals", intervals.data, "problem.intervals_shape");
    return {};
  }
  const bool plan_alone = intervals.data == nullptr && is_given(in.plan);
  if (plan_alone && backend.plan_use == PlanUse::used) return {};
  check_input("intervals", {intervals.data, {intervals.stride_batch, intervals.stride_head, 0, 1}},
              {batch, heads, 1, p.seqlen_k});
  return {intervals.data, batch == 1 ? 0 : intervals.stride_batch,
          heads == 1 ? 0 : intervals.stride_head};
}

Plan validated_plan(const Problem& p, const Plan& plan, const Backend& backend) {
  const bool has_plan = is_given(plan);
  if (!is_given(p.intervals_shape)) {
    if (has_plan) throw InvalidArgument("plan", "a plan", "none without intervals");
    return {};
  }
  if (backend.plan_use == PlanUse::unused) return plan;
  if (backend.plan_use == PlanUse::used && !has_plan) return {};

  const std::int64_t tile_rows = backend.query_tile_rows(p);
  if (!has_plan) {
    throw InvalidArgument("plan", "none",
                          "the plan of the intervals, as backend \"" + std::string(backend.name) +
                              "\" needs it, with tile_rows " + std::to_string(tile_rows));
  }
  if (plan.tile_rows != tile_rows) {
    throw InvalidArgument("plan.tile_rows", std::to_string(plan.tile_rows),
                          std::to_string(tile_rows) + " (query_tile_rows)");
  }
  const std::int64_t tiles = (p.seqlen_q + tile_rows - 1) / tile_rows;
  if (plan.tiles != tiles) {
    throw InvalidArgument("plan.tiles", std::to_string(plan.tiles),
                          std::to_string(tiles) + " = ceil(problem.seqlen_q / plan.tile_rows)");
  }
  const auto [batch, heads] = p.intervals_shape;
  const Shape4 shape = {batch, heads, 1, tiles};
  const Shape4 stride = {plan.stride_batch, plan.stride_head, 0, 1};
  check_input("plan.begin", {plan.begin, stride}, shape);
  check_input("plan.count", {plan.count, stride}, shape);
  check_input("plan.full", {plan.full, stride}, shape);
  Plan result = plan;
  if (batch == 1) result.stride_batch = 0;
  if (heads == 1) result.stride_head = 0;
  return result;
}

void check_lse(std::string_view argument, const void* data, const Problem& p) {
  if (data == nullptr && has_elements(std::array{p.batch, p.heads_q, p.seqlen_q})) {
    throw InvalidArgument(argument, "null data",
                          "data of shape " + text(std::array{p.batch, p.heads_q, p.seqlen_q}));
  }
}

Shape4 query_shape(const Problem& p) { return {p.batch, p.seqlen_q, p.heads_q, p.head_dim}; }
Shape4 key_shape(const Problem& p) { return {p.batch, p.seqlen_k, p.heads_kv, p.head_dim}; }

}  // namespace

void validate(const Problem& p) {
  require_length("problem.batch", p.batch);
  require_length("problem.heads_q", p.heads_q);
  require_length("problem.heads_kv", p.heads_kv);
  require_length("problem.seqlen_q", p.seqlen_q);
  require_length("problem.seqlen_k", p.seqlen_k);
  if (p.head_dim < 1 || p.head_dim > 256) {
    throw InvalidArgument("problem.head_dim", std::to_string(p.head_dim), "1 to 256");
  }
  if (p.heads_kv == 0 ? p.heads_q != 0 : p.heads_q % p.heads_kv != 0) {
    throw InvalidArgument("problem.heads_q", std::to_string(p.heads_q),
                          "a multiple of problem.heads_kv = " + std::to_string(p.heads_kv));
  }
  if (!product_fits({p.batch, std::max(p.heads_q, p.heads_kv), std::max(p.seqlen_q, p.seqlen_k),
                     p.head_dim})) {
    throw InvalidArgument(
        "problem",
        "batch, heads_q, seqlen_q, seqlen_k, head_dim " +
            text(std::array{p.batch, p.heads_q, p.seqlen_q, p.seqlen_k, p.head_dim}),
        "tensors of at most 2^56 elements");
  }
  if (p.dtype > DType::f64) {
    throw InvalidArgument("problem.dtype", std::to_string(static_cast<int>(p.dtype)),
                          "f32, bf16, f16 or f64");
  }
  if (p.device > Device::cuda) {
    throw InvalidArgument("problem.device", std::to_string(static_cast<int>(p.device)),
                          "cpu or cuda");
  }
  if (p.nonfinite > NonFinite::propagate) {
    throw InvalidArgument("problem.nonfinite", std::to_string(static_cast<int>(p.nonfinite)),
                          "saturate or propagate");
  }
  if (!std::isfinite(p.scale)) {
    throw InvalidArgument("problem.scale", text(p.scale), "a finite number");
  }
  if (!std::isfinite(p.softcap) || p.softcap < 0) {
    throw InvalidArgument("problem.softcap", text(p.softcap), "a finite number >= 0 (0 = none)");
  }
  check_broadcast_shape("problem.mask_shape", p, p.mask_shape);
  check_broadcast_shape("problem.bias_shape", p, p.bias_shape);
  check_bias_dtype(p);
  const auto [batch, heads] = p.intervals_shape;
  if (is_given(p.intervals_shape) &&
      !((batch == p.batch || batch == 1) && (heads == p.heads_kv || heads == 1))) {
    throw InvalidArgument(
        "problem.intervals_shape", text(p.intervals_shape),
        "(" + choice({p.batch}) + ", " + choice({p.heads_kv}) + "), or all zero for none");
  }
  check_rank_shapes(p);
}

Inputs validated(const Problem& p, const Inputs& in, const Backend& backend) {
  check_input("q", in.q, query_shape(p));
  check_input("k", in.k, key_shape(p));
  check_input("v", in.v, key_shape(p));
  Inputs result = in;
  result.mask = validated_broadcast("mask", in.mask, "problem.mask_shape", p.mask_shape);
  result.bias = validated_broadcast("bias", in.bias, "problem.bias_shape", p.bias_shape);
  result.key_rank =
      validated_broadcast("key_rank", in.key_rank, "problem.rank_shape", p.rank_shape);
  result.rank_limit =
      validated_broadcast("rank_limit", in.rank_limit, "problem.limit_shape", p.limit_shape);
  result.intervals = validated_intervals(p, in, backend);
  result.plan = validated_plan(p, in.plan, backend);
  return result;
}

ForwardArgs validated(const ForwardArgs& args, const Backend& backend) {
  const Problem& p = args.problem;
  ForwardArgs result = args;
  result.in = validated(p, args.in, backend);
  check_output("out", args.out, query_shape(p));
  check_lse("lse", args.lse, p);
  return result;
}

BackwardArgs validated(const BackwardArgs& args, const Backend& backend) {
  const Problem& p = args.problem;
  BackwardArgs result = args;
  result.in = validated(p, args.in, backend);
  check_input("out", args.out, query_shape(p));
  check_lse("lse", args.lse, p);
  check_input("dout", args.dout, query_shape(p));
  check_gradient("dq", args.dq, query_shape(p));
  check_gradient("dk", args.dk, key_shape(p));
  check_gradient("dv", args.dv, key_shape(p));
  if (!is_given(p.bias_shape)) {
    check_absent("dbias", args.dbias.data, "problem.bias_shape");
  } else {
    check_gradient("dbias", args.dbias, p.bias_shape);
    result.dbias.stride = broadcast_strides(args.dbias.stride, p.bias_shape);
  }
  return result;
}

}  // namespace flash_dmattn
