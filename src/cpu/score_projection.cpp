#include "cpu/score_projection.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/float_types.h"
#include "common/plan_content.h"
#include "common/score_form.h"
#include "common/tasks.h"
#include "cpu/dispatch.h"
#include "cpu/task.h"

namespace flash_dmattn::cpu {
namespace {

ScoreProjectionTask task_of(const ScoreProjectionArgs& args) {
  return {.batch = args.batch,
          .seqlen = args.seqlen,
          .features = args.features,
          .heads = args.heads,
          .hidden = args.hidden,
          .hidden_batch = args.hidden_stride[0],
          .hidden_token = args.hidden_stride[1],
          .weight = args.weight,
          .is_weight_f32 = args.weight_dtype == DType::f32,
          .weight_head = args.weight_stride,
          .bias = args.bias,
          .bias_dtype = args.bias_dtype,
          .scores = static_cast<float*>(args.scores)};
}

// Makes scores of the projections of an item.
void apply_form(const ScoreProjectionArgs& args, std::int64_t item) {
  if (args.form == ScoreForm::projection) return;
  auto* scores = static_cast<float*>(args.scores);
  const std::int64_t begin = item * projection_tokens;
  const std::int64_t end = std::min(begin + projection_tokens, args.batch * args.seqlen);
  for (std::int64_t h = 0; h < args.heads; ++h) {
    const float factor =
        args.factor == nullptr ? 0.0f : static_cast<float>(load(args.factor, args.factor_dtype, h));
    for (std::int64_t t = begin; t < end; ++t) {
      float& score = scores[(t / args.seqlen * args.heads + h) * args.seqlen + t % args.seqlen];
      score = score_of(args.form, score, factor);
    }
  }
}

class ProjectionPlan {
 public:
  std::size_t bytes = 0;

  // Throws for a FLASH_DMATTN_MAX_ISA that names no instruction set.
  ProjectionPlan(const ScoreProjectionArgs& args, const Execution&)
      : kernels_(&chosen_instruction_set().kernels_of(args.hidden_dtype)) {}

  void run(const ScoreProjectionArgs& args, const Execution& execution) const {
    const ScoreProjectionTask task = task_of(args);
    const std::int64_t tokens = args.batch * args.seqlen;
    for_each_task(execution, (tokens + projection_tokens - 1) / projection_tokens,
                  [&](std::int64_t item, int) {
                    kernels_->project_scores(task, item);
                    apply_form(args, item);
                  });
  }

 private:
  const Kernels* kernels_;
};

}  // namespace

PlanFunction<ScoreProjectionArgs> find_score_projection(const ScoreProjectionArgs& args,
                                                        std::string& reason) {
  if (args.hidden_dtype == DType::f64) {
    reason = "f64 is computed by the reference backend";
    return nullptr;
  }
  return make_plan<ProjectionPlan>;
}

}  // namespace flash_dmattn::cpu
