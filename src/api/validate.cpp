#include "api/validate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>

#include "common/arguments.h"
#include "flash_dmattn/error.h"

namespace flash_dmattn {
namespace {

using Shape4 = std::array<std::int64_t, 4>;

std::string text(double value) {
  std::ostringstream stream;
  stream << value;
  return stream.str();
}

// "1", or "{size|1}" with every size once.
std::string choice(std::initializer_list<std::int64_t> sizes) {
  std::string result;
  std::int64_t before = 1;
  for (const std::int64_t size : sizes) {
    if (size != 1 && size != before) result += std::to_string(size) + "|";
    before = size;
  }
  return result.empty() ? "1" : "{" + result + "1}";
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
    throw InvalidArgument(argument, shape_text(shape),
                          "(" + choice({p.batch}) + ", " + choice({p.heads_q, p.heads_kv}) + ", " +
                              choice({p.seqlen_q}) + ", " + choice({p.seqlen_k}) +
                              "), or all zero for none");
  }
  if (!product_fits({shape[0], shape[1], shape[2], shape[3]})) {
    throw InvalidArgument(argument, shape_text(shape), "at most 2^56 elements");
  }
}

// [B|1, Hkv|1] of intervals.
void check_row_shape(std::string_view argument, const Problem& p,
                     const std::array<std::int64_t, 2>& shape) {
  const auto [batch, heads] = shape;
  const bool fits = (batch == p.batch || batch == 1) && (heads == p.heads_kv || heads == 1);
  if (is_given(shape) && !fits) {
    throw InvalidArgument(
        argument, shape_text(shape),
        "(" + choice({p.batch}) + ", " + choice({p.heads_kv}) + "), or all zero for none");
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

void check_bias_delay(const Problem& p) {
  if (p.bias_delay < 0) {
    throw InvalidArgument("problem.bias_delay", std::to_string(p.bias_delay), "at least 0");
  }
  if (p.bias_delay > 0 && p.bias_shape[2] != 1) {
    throw InvalidArgument("problem.bias_delay", std::to_string(p.bias_delay),
                          "0, or a bias without a query dimension: problem.bias_shape is " +
                              shape_text(p.bias_shape));
  }
}

// Kernels round both to fp32.
void check_scale_and_softcap(const Problem& p) {
  const bool wide = p.dtype == DType::f64;
  const double largest =
      wide ? std::numeric_limits<double>::max() : double{std::numeric_limits<float>::max()};
  const std::string finite = wide ? "a finite f64" : "a finite f32";
  if (!(std::abs(p.scale) <= largest)) {
    throw InvalidArgument("problem.scale", text(p.scale), finite);
  }
  if (!(p.softcap >= 0 && p.softcap <= largest)) {
    throw InvalidArgument("problem.softcap", text(p.softcap), finite + " >= 0 (0 = none)");
  }
}

// ---- Tensors -------------------------------------------------------------------------------------

void check_span(std::string_view argument, const ConstTensor4& tensor, const Shape4& shape) {
  std::int64_t room = max_elements;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] <= 1) continue;
    const std::int64_t most = room / (shape[i] - 1);
    if (tensor.stride[i] > most || tensor.stride[i] < -most) {
      throw InvalidArgument(
          argument, "strides " + shape_text(tensor.stride) + " for shape " + shape_text(shape),
          "a span of at most 2^56 elements");
    }
    room -= std::abs(tensor.stride[i]) * (shape[i] - 1);
  }
}

}  // namespace

void check_input(std::string_view argument, const ConstTensor4& tensor, const Shape4& shape) {
  if (!has_elements(shape)) return;
  if (tensor.data == nullptr) {
    throw InvalidArgument(argument, "null data", "data of shape " + shape_text(shape));
  }
  if (shape[3] > 1 && tensor.stride[3] != 1) {
    throw InvalidArgument(argument, "strides " + shape_text(tensor.stride),
                          "a last dimension that is contiguous (stride 1)");
  }
  check_span(argument, tensor, shape);
}

void check_output(std::string_view argument, const Tensor4& tensor, const Shape4& shape) {
  check_input(argument, tensor, shape);
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (has_elements(shape) && shape[i] > 1 && tensor.stride[i] == 0) {
      throw InvalidArgument(
          argument, "strides " + shape_text(tensor.stride) + " for shape " + shape_text(shape),
          "an output whose elements do not overlap");
    }
  }
}

namespace {

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

// ---- Visibility ----------------------------------------------------------------------------------

KeyIntervals validated_intervals(const Problem& p, const KeyIntervals& intervals) {
  if (!is_given(p.intervals_shape)) {
    check_absent("visibility.intervals", intervals.data, "problem.intervals_shape");
    return {nullptr, 0, 0};
  }
  const auto [batch, heads] = p.intervals_shape;
  const KeyIntervals result = with_resolved_strides(intervals, batch, heads, p.seqlen_k);
  check_input("visibility.intervals",
              {result.data, {result.stride_batch, result.stride_head, 0, 1}},
              {batch, heads, 1, p.seqlen_k});
  return result;
}

// ---- Statistics of rows --------------------------------------------------------------------------

void check_row_dtype(std::string_view argument, const ConstRowValues& values, const Problem& p) {
  const DType expected = p.dtype == DType::f64 ? DType::f64 : DType::f32;
  if (values.data != nullptr && values.dtype != expected) {
    throw InvalidArgument(
        argument, name_of(values.dtype),
        std::string(name_of(expected)) + " with problem.dtype " + std::string(name_of(p.dtype)));
  }
}

void check_lse(const ConstRowValues& lse, const ConstRowValues& lse_low, const Problem& p) {
  const std::array shape = {p.batch, p.heads_q, p.seqlen_q};
  if (lse.data == nullptr && has_elements(shape)) {
    throw InvalidArgument("lse", "null data", "data of shape " + shape_text(shape));
  }
  check_row_dtype("lse", lse, p);
  check_row_dtype("lse_low", lse_low, p);
}

}  // namespace

void validate(const Problem& p) {
  require_length("problem.batch", p.batch);
  require_length("problem.heads_q", p.heads_q);
  require_length("problem.heads_kv", p.heads_kv);
  require_length("problem.seqlen_q", p.seqlen_q);
  require_length("problem.seqlen_k", p.seqlen_k);
  require_range("problem.head_dim", p.head_dim, 1, 256);
  require_range("problem.value_dim", value_dim_of(p), 1, p.head_dim);
  if (p.heads_kv == 0 ? p.heads_q != 0 : p.heads_q % p.heads_kv != 0) {
    throw InvalidArgument("problem.heads_q", std::to_string(p.heads_q),
                          "a multiple of problem.heads_kv = " + std::to_string(p.heads_kv));
  }
  if (!product_fits({p.batch, std::max(p.heads_q, p.heads_kv), std::max(p.seqlen_q, p.seqlen_k),
                     p.head_dim})) {
    throw InvalidArgument(
        "problem",
        "batch, heads_q, seqlen_q, seqlen_k, head_dim " +
            shape_text(std::array{p.batch, p.heads_q, p.seqlen_q, p.seqlen_k, p.head_dim}),
        "tensors of at most 2^56 elements");
  }
  if (p.dtype > DType::f64) {
    throw InvalidArgument("problem.dtype", name_of(p.dtype), "f32, bf16, f16 or f64");
  }
  if (p.device > Device::cuda) {
    throw InvalidArgument("problem.device", std::to_string(static_cast<int>(p.device)),
                          "cpu or cuda");
  }
  if (p.nonfinite > NonFinite::propagate) {
    throw InvalidArgument("problem.nonfinite", std::to_string(static_cast<int>(p.nonfinite)),
                          "saturate or propagate");
  }
  check_scale_and_softcap(p);
  check_broadcast_shape("problem.mask_shape", p, p.mask_shape);
  check_broadcast_shape("problem.bias_shape", p, p.bias_shape);
  check_bias_dtype(p);
  check_bias_delay(p);
  check_row_shape("problem.intervals_shape", p, p.intervals_shape);
}

Visibility validated(const Problem& p, const Visibility& visibility) {
  Visibility result = visibility;
  result.intervals = validated_intervals(p, visibility.intervals);
  return result;
}

namespace {

Inputs validated(const Problem& p, const Inputs& in) {
  check_input("q", in.q, query_shape(p));
  check_input("k", in.k, key_shape(p));
  check_input("v", in.v, value_shape(p));
  Inputs result = in;
  result.mask = validated_broadcast("mask", in.mask, "problem.mask_shape", p.mask_shape);
  result.bias = validated_broadcast("bias", in.bias, "problem.bias_shape", p.bias_shape);
  result.visibility = validated(p, in.visibility);
  return result;
}

}  // namespace

ForwardArgs validated(const ForwardArgs& args) {
  const Problem& p = args.problem;
  ForwardArgs result = args;
  result.in = validated(p, args.in);
  check_output("out", args.out, out_shape(p));
  check_lse(args.lse, args.lse_low, p);
  return result;
}

BackwardArgs validated(const BackwardArgs& args) {
  const Problem& p = args.problem;
  BackwardArgs result = args;
  result.in = validated(p, args.in);
  check_input("out", args.out, out_shape(p));
  check_lse(args.lse, args.lse_low, p);
  check_input("dout", args.dout, out_shape(p));
  check_row_dtype("dlse", args.dlse, p);
  check_gradient("dq", args.dq, query_shape(p));
  check_gradient("dk", args.dk, key_shape(p));
  check_gradient("dv", args.dv, value_shape(p));
  if (!is_given(p.bias_shape)) {
    check_absent("dbias", args.dbias.data, "problem.bias_shape");
  } else {
    check_gradient("dbias", args.dbias, p.bias_shape);
    result.dbias.stride = broadcast_strides(args.dbias.stride, p.bias_shape);
  }
  return result;
}

}  // namespace flash_dmattn
