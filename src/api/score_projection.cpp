#include <array>
#include <string>

#include "api/checked_call.h"
#include "api/find_backend.h"
#include "backend.h"
#include "common/arguments.h"
#include "flash_dmattn/error.h"

namespace flash_dmattn {
namespace {

void require_dtype_beside(std::string_view argument, DType dtype, DType hidden) {
  if (dtype == hidden || (dtype == DType::f32 && hidden != DType::f64)) return;
  const std::string own(name_of(hidden));
  throw InvalidArgument(argument, name_of(dtype), hidden == DType::f64 ? own : "f32 or " + own);
}

ScoreProjectionArgs validated(const ScoreProjectionArgs& args) {
  require_length("batch", args.batch);
  require_length("seqlen", args.seqlen);
  require_length("features", args.features);
  require_length("heads", args.heads);
  require_rows(args.batch, args.seqlen, args.features);
  require_rows(args.batch, args.seqlen, args.heads);
  if (args.hidden_dtype > DType::f64) {
    throw InvalidArgument("hidden_dtype", name_of(args.hidden_dtype), "f32, bf16, f16 or f64");
  }
  require_dtype_beside("weight_dtype", args.weight_dtype, args.hidden_dtype);
  if (args.bias != nullptr) require_dtype_beside("bias_dtype", args.bias_dtype, args.hidden_dtype);
  if (args.factor != nullptr) {
    require_dtype_beside("factor_dtype", args.factor_dtype, args.hidden_dtype);
  }
  const bool has_scores = args.batch * args.seqlen > 0 && args.heads > 0;
  require_pointer("hidden", args.hidden, has_scores && args.features > 0);
  require_pointer("weight", args.weight, has_scores && args.features > 0);
  require_pointer("scores", args.scores, has_scores);
  const bool has_factor = args.form == ScoreForm::linear || args.form == ScoreForm::doge;
  require_pointer("factor", args.factor, has_scores && has_factor);
  ScoreProjectionArgs result = args;
  const auto hidden = resolved_strides<3>({args.hidden_stride[0], args.hidden_stride[1], 1},
                                          {args.batch, args.seqlen, args.features});
  result.hidden_stride = {hidden[0], hidden[1]};
  result.weight_stride =
      resolved_strides<2>({args.weight_stride, 1}, {args.heads, args.features})[0];
  return result;
}

PlanFunction<ScoreProjectionArgs> find_plan(const Backend& backend, const ScoreProjectionArgs& args,
                                            std::string& reason) {
  if (backend.device != args.device) {
    reason = "computes in " + std::string(name_of(backend.device)) + " memory";
    return nullptr;
  }
  return backend.find_score_projection(args, reason);
}

}  // namespace

ScoreProjectionArgs plan_call(const ScoreProjectionArgs& args, const Execution& execution,
                              std::string_view name, Plan<ScoreProjectionArgs>& plan) {
  const ScoreProjectionArgs valid = validated(args);
  const auto found = search_backends<ScoreProjectionArgs>(
      valid.device, name, [&](const Backend& backend, std::string& reason) {
        return find_plan(backend, valid, reason);
      });
  require_backend(found, name, "one that projects scores").plan(valid, execution, plan);
  return valid;
}

template class CheckedCall<ScoreProjectionArgs>;

void project_scores(const ScoreProjectionArgs& args, const Execution& execution,
                    std::string_view name) {
  ScoreProjectionCall(args, execution, name).run(workspace_of(execution));
}

}  // namespace flash_dmattn
