#include "cuda/score_projection/score_projection.h"

#include "cuda/device_plan.h"
#include "cuda/primitives/launch.h"
#include "cuda/score_projection/kernel.cuh"

namespace flash_dmattn::cuda {
namespace {

// Four tokens at a time, so that a weight from the L1 serves four products. 128 registers of a thread.
template <class T, class Weight, int Heads>
using ManyTokens = ScoreProjectionKernel<T, Weight, 4, Heads, 2, 8>;
// A warp for each token and head, in blocks of their own that spread over the multiprocessors.
template <class T, class Weight>
using FewTokens = ScoreProjectionKernel<T, Weight, 1, 1, 1, 16>;

bool is_multiple(std::int64_t elements, std::int64_t of) { return elements % of == 0; }

// Whether pairs of elements are at multiples of their size.
bool has_aligned_pairs(const void* data, DType dtype, std::int64_t stride) {
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(data));
  return is_multiple(address, 2 * size_of(dtype)) && is_multiple(stride, 2);
}

ScoreProjectionParams params_of(const ScoreProjectionArgs& args) {
  return {.hidden = args.hidden,
          .weight = args.weight,
          .bias = args.bias,
          .factor = args.factor,
          .scores = static_cast<float*>(args.scores),
          .hidden_batch = args.hidden_stride[0],
          .hidden_token = args.hidden_stride[1],
          .weight_head = args.weight_stride,
          .tokens = args.batch * args.seqlen,
          .seqlen = args.seqlen,
          .features = static_cast<unsigned>(args.features),
          .heads = static_cast<int>(args.heads),
          .form = args.form,
          .bias_dtype = args.bias_dtype,
          .factor_dtype = args.factor_dtype,
          .has_aligned_pairs =
              has_aligned_pairs(args.hidden, args.hidden_dtype, args.hidden_stride[0]) &&
              is_multiple(args.hidden_stride[1], 2) &&
              has_aligned_pairs(args.weight, args.weight_dtype, args.weight_stride)};
}

template <class Kernel>
void launch_projection(ScoreProjectionParams params, cudaStream_t stream) {
  params.head_groups = (params.heads + Kernel::heads - 1) / Kernel::heads;
  launch<Kernel>(Kernel::blocks(params), params, stream);
}

template <class T, class Weight>
void project(const ScoreProjectionArgs& args, cudaStream_t stream) {
  const ScoreProjectionParams params = params_of(args);
  const std::int64_t warps =
      (params.tokens + 3) / 4 * ((params.heads + 7) / 8);  // of the kernel for many tokens
  if (warps < current_device().multiprocessors) {
    launch_projection<FewTokens<T, Weight>>(params, stream);
  } else if (params.heads == 1) {
    launch_projection<ManyTokens<T, Weight, 1>>(params, stream);
  } else if (params.heads == 2) {
    launch_projection<ManyTokens<T, Weight, 2>>(params, stream);
  } else if (params.heads <= 4) {
    launch_projection<ManyTokens<T, Weight, 4>>(params, stream);
  } else {
    launch_projection<ManyTokens<T, Weight, 8>>(params, stream);
  }
}

template <class T>
void project_of(const ScoreProjectionArgs& args, cudaStream_t stream) {
  if (args.weight_dtype == DType::f32) {
    project<T, float>(args, stream);
  } else {
    project<T, T>(args, stream);
  }
}

void project_scores(const ScoreProjectionArgs& args, const Execution& execution) {
  if (args.batch * args.seqlen == 0 || args.heads == 0) return;
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  switch (args.hidden_dtype) {
    case DType::bf16: return project_of<__nv_bfloat16>(args, stream);
    case DType::f16: return project_of<__half>(args, stream);
    default: return project<float, float>(args, stream);
  }
}

}  // namespace

PlanFunction<ScoreProjectionArgs> find_score_projection(const ScoreProjectionArgs& args,
                                                        std::string& reason) {
  reason = decline_driver();
  if (reason.empty() && args.hidden_dtype == DType::f64) reason = "f64 is for the reference alone";
  if (reason.empty() && (args.batch * args.seqlen + 7) / 8 * ((args.heads + 7) / 8) >= 1l << 31) {
    reason = "a grid has at most 2^31 blocks, each of 8 tokens and 8 heads";
  }
  if (!reason.empty()) return nullptr;
  return make_plan<
      OnDevice<DirectPlan<ScoreProjectionArgs, no_workspace<ScoreProjectionArgs>, project_scores>>>;
}

}  // namespace flash_dmattn::cuda
