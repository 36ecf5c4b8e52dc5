#include "api/check_finite.h"

#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "backend.h"
#include "flash_dmattn/error.h"
#include "float_types.h"

namespace flash_dmattn {
namespace {

using Shape4 = std::array<std::int64_t, 4>;

enum class Accept : std::uint8_t { finite, finite_and_minus_inf };

std::string index_text(const std::int64_t* index, int rank) {
  std::string result = "[";
  for (int i = 0; i < rank; ++i) result += (i > 0 ? ", " : "") + std::to_string(index[i]);
  return result + "]";
}

std::string value_text(double value) {
  if (std::isnan(value)) return "nan";
  return value > 0 ? "inf" : "-inf";
}

struct Found {
  bool exists = false;
  Shape4 index{};
  double value = 0;
};

// Visits elements in the order of their indices.
Found first_nonfinite(const ConstTensor4& tensor, const Shape4& shape, DType dtype,
                      bool minus_inf) {
  Shape4 index{};
  const auto& stride = tensor.stride;
  for (index[0] = 0; index[0] < shape[0]; ++index[0]) {
    for (index[1] = 0; index[1] < shape[1]; ++index[1]) {
      for (index[2] = 0; index[2] < shape[2]; ++index[2]) {
        for (index[3] = 0; index[3] < shape[3]; ++index[3]) {
          const double value = load(tensor.data, dtype,
                                    index[0] * stride[0] + index[1] * stride[1] +
                                        index[2] * stride[2] + index[3] * stride[3]);
          if (std::isfinite(value) || (minus_inf && value < 0)) continue;  // a NaN is not below 0
          return {true, index, value};
        }
      }
    }
  }
  return {};
}

Found at_index(const NonFiniteElement& element, const Shape4& shape) {
  if (element.index < 0) return {};
  Found found{true, {}, element.value};
  std::int64_t rest = element.index;
  for (std::size_t d = shape.size(); d-- > 0; rest /= shape[d]) found.index[d] = rest % shape[d];
  return found;
}

// The checks of one stage: "forward input", ...
struct Stage {
  std::string_view name;
  const Problem& problem;
  const Execution& execution;

  // `rank` of the indices are shown, the first ones being of size 1 if it is less than 4.
  void check(std::string_view tensor_name, const ConstTensor4& tensor, const Shape4& shape,
             DType dtype, Accept accept = Accept::finite, int rank = 4) const {
    if (tensor.data == nullptr) return;
    const bool minus_inf = accept == Accept::finite_and_minus_inf;
    const Found found =
        problem.device == Device::cpu
            ? first_nonfinite(tensor, shape, dtype, minus_inf)
            : at_index(backend_of(problem.device)
                           .first_nonfinite(tensor, shape, dtype, minus_inf, execution),
                       shape);
    if (!found.exists) return;
    throw NonFiniteError(std::string(name) + " " + std::string(tensor_name) +
                         index_text(found.index.data() + 4 - rank, rank) + " is " +
                         value_text(found.value));
  }

  void check_query(std::string_view tensor_name, const ConstTensor4& tensor) const {
    const Problem& p = problem;
    check(tensor_name, tensor, {p.batch, p.seqlen_q, p.heads_q, p.head_dim}, p.dtype);
  }

  void check_key(std::string_view tensor_name, const ConstTensor4& tensor) const {
    const Problem& p = problem;
    check(tensor_name, tensor, {p.batch, p.seqlen_k, p.heads_kv, p.head_dim}, p.dtype);
  }

  void check_value(std::string_view tensor_name, const ConstTensor4& tensor) const {
    const Problem& p = problem;
    check(tensor_name, tensor, {p.batch, p.seqlen_k, p.heads_kv, value_dim_of(p)}, p.dtype);
  }

  void check_out(std::string_view tensor_name, const ConstTensor4& tensor) const {
    const Problem& p = problem;
    check(tensor_name, tensor, {p.batch, p.seqlen_q, p.heads_q, value_dim_of(p)}, p.dtype);
  }

  void check_rows(std::string_view values_name, const ConstRowValues& values,
                  Accept accept = Accept::finite) const {
    const Problem& p = problem;
    const Shape4 shape = {1, p.batch, p.heads_q, p.seqlen_q};
    check(values_name, {values.data, contiguous_strides(shape)}, shape, values.dtype, accept, 3);
  }

  void check_lse(const ConstRowValues& lse) const {
    check_rows("lse", lse, Accept::finite_and_minus_inf);
  }

  void check_shared(const Inputs& in) const {
    check_query("q", in.q);
    check_key("k", in.k);
    check_value("v", in.v);
    check("bias", in.bias, problem.bias_shape, problem.bias_dtype, Accept::finite_and_minus_inf);
  }
};

std::atomic<bool>& check_finite() {
  static std::atomic<bool> enabled = [] {
    const char* value = std::getenv("FLASH_DMATTN_CHECK_FINITE");
    return check_finite_of(value == nullptr ? "" : value);
  }();
  return enabled;
}

}  // namespace

bool check_finite_of(std::string_view value) {
  if (value.empty() || value == "0") return false;
  if (value == "1") return true;
  throw InvalidArgument("FLASH_DMATTN_CHECK_FINITE", std::string(value), "0 or 1");
}

bool check_finite_enabled() { return check_finite().load(std::memory_order_relaxed); }

void set_check_finite(bool enabled) { check_finite() = enabled; }

void check_inputs_finite(const ForwardArgs& args, const Execution& execution) {
  Stage{"forward input", args.problem, execution}.check_shared(args.in);
}

void check_outputs_finite(const ForwardArgs& args, const Execution& execution) {
  const Stage stage{"forward output", args.problem, execution};
  stage.check_out("out", args.out);
  stage.check_lse(args.lse);
}

void check_inputs_finite(const BackwardArgs& args, const Execution& execution) {
  const Stage stage{"backward input", args.problem, execution};
  stage.check_shared(args.in);
  stage.check_out("out", args.out);
  stage.check_lse(args.lse);
  stage.check_out("dout", args.dout);
  stage.check_rows("dlse", args.dlse);
}

void check_outputs_finite(const BackwardArgs& args, const Execution& execution) {
  const Stage stage{"backward output", args.problem, execution};
  stage.check_query("dq", args.dq);
  stage.check_key("dk", args.dk);
  stage.check_value("dv", args.dv);
  stage.check("dbias", args.dbias, args.problem.bias_shape, args.problem.bias_dtype);
}

namespace {

// The new tokens and the results as those of attention among the tokens.
ForwardArgs token_attention(const DecodeStepArgs& args) {
  ForwardArgs result;
  result.problem = pending_problem(args.cache, args.heads_q, 1, args.scale, ScoreUse::choose);
  result.problem.seqlen_k = 1;
  result.problem.intervals_shape = {};
  result.in = {.q = args.q, .k = args.k, .v = args.v};
  result.out = args.out;
  result.lse = args.lse;
  return result;
}

}  // namespace

void check_inputs_finite(const DecodeStepArgs& args, const Execution& execution) {
  check_inputs_finite(token_attention(args), execution);
}

void check_outputs_finite(const DecodeStepArgs& args, const Execution& execution) {
  check_outputs_finite(token_attention(args), execution);
}

}  // namespace flash_dmattn
