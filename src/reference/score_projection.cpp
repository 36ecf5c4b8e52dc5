#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/float_types.h"
#include "common/plan_content.h"
#include "common/tasks.h"
#include "reference/kernels.h"

namespace flash_dmattn::reference {
namespace {

double score_of(ScoreForm form, double z, double factor) {
  const double softplus = std::max(z, 0.0) + std::log1p(std::exp(-std::abs(z)));
  switch (form) {
    case ScoreForm::projection: return z;
    case ScoreForm::gelu: return z * std::erfc(-z * std::sqrt(0.5)) / 2;
    case ScoreForm::gate: return std::min(z, 0.0) - std::log1p(std::exp(-std::abs(z)));
    case ScoreForm::linear: return factor * softplus;
    case ScoreForm::doge: break;
  }
  return std::exp(factor * softplus);
}

double score(const ScoreProjectionArgs& args, std::int64_t b, std::int64_t s, std::int64_t h) {
  const std::int64_t token = b * args.hidden_stride[0] + s * args.hidden_stride[1];
  double sum = 0;
  for (std::int64_t f = 0; f < args.features; ++f) {
    sum += load(args.hidden, args.hidden_dtype, token + f) *
           load(args.weight, args.weight_dtype, h * args.weight_stride + f);
  }
  if (args.bias != nullptr) sum += load(args.bias, args.bias_dtype, h);
  return score_of(args.form, sum,
                  args.factor == nullptr ? 0 : load(args.factor, args.factor_dtype, h));
}

void project(const ScoreProjectionArgs& args, const Execution& execution) {
  const DType dtype = args.hidden_dtype == DType::f64 ? DType::f64 : DType::f32;
  for_each_task(execution, args.batch * args.seqlen, [&](std::int64_t row, int) {
    const std::int64_t b = row / args.seqlen;
    const std::int64_t s = row % args.seqlen;
    for (std::int64_t h = 0; h < args.heads; ++h) {
      store(args.scores, dtype, (b * args.heads + h) * args.seqlen + s, score(args, b, s, h));
    }
  });
}

}  // namespace

PlanFunction<ScoreProjectionArgs> find_score_projection(const ScoreProjectionArgs&, std::string&) {
  return make_plan<DirectPlan<ScoreProjectionArgs, no_workspace<ScoreProjectionArgs>, project>>;
}

}  // namespace flash_dmattn::reference
