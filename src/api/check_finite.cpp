#include "api/check_finite.h"

#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "api/validate.h"
#include "backend.h"
#include "flash_dmattn/error.h"

namespace flash_dmattn {
namespace {

using Shape4 = std::array<std::int64_t, 4>;

enum class Accept : std::uint8_t { finite, finite_and_minus_inf };

// The last `rank` numbers of the index of an element, of which the others are 0.
std::string index_text(std::int64_t element, const Shape4& shape, std::size_t rank) {
  std::string result = "]";
  for (std::size_t dim = shape.size(); dim-- > shape.size() - rank; element /= shape[dim]) {
    result.insert(0,
                  (rank + dim > shape.size() ? ", " : "[") + std::to_string(element % shape[dim]));
  }
  return result;
}

std::string value_text(double value) {
  if (std::isnan(value)) return "nan";
  return value > 0 ? "inf" : "-inf";
}

// The checks of one stage: "forward input", ...
struct Stage {
  std::string_view name;
  const Problem& problem;
  const Execution& execution;

  // `rank` of the indices are shown, the first ones being of size 1 if it is less than 4.
  void check(std::string_view tensor_name, const ConstTensor4& tensor, const Shape4& shape,
             DType dtype, Accept accept = Accept::finite, std::size_t rank = 4) const {
    if (tensor.data == nullptr) return;
    const NonFiniteElement found =
        backend_of(problem.device)
            .first_nonfinite(tensor, shape, dtype, accept == Accept::finite_and_minus_inf,
                             execution);
    if (found.index < 0) return;
    throw NonFiniteError(std::string(name) + " " + std::string(tensor_name) +
                         index_text(found.index, shape, rank) + " is " + value_text(found.value));
  }
  void check(std::string_view tensor_name, const ConstTensor4& tensor, const Shape4& shape) const {
    check(tensor_name, tensor, shape, problem.dtype);
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
    check("q", in.q, query_shape(problem));
    check("k", in.k, key_shape(problem));
    check("v", in.v, value_shape(problem));
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
  stage.check("out", args.out, out_shape(args.problem));
  stage.check_lse(args.lse);
}

void check_inputs_finite(const BackwardArgs& args, const Execution& execution) {
  const Stage stage{"backward input", args.problem, execution};
  stage.check_shared(args.in);
  stage.check("out", args.out, out_shape(args.problem));
  stage.check_lse(args.lse);
  stage.check("dout", args.dout, out_shape(args.problem));
  stage.check_rows("dlse", args.dlse);
}

void check_outputs_finite(const BackwardArgs& args, const Execution& execution) {
  const Stage stage{"backward output", args.problem, execution};
  stage.check("dq", args.dq, query_shape(args.problem));
  stage.check("dk", args.dk, key_shape(args.problem));
  stage.check("dv", args.dv, value_shape(args.problem));
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
