#include "backend.h"

// Replaces the CUDA backend in a build without CUDA. It declines every call, so that the API never calls its other
// members.
namespace flash_dmattn {
namespace {

constexpr const char* reason = "this build has no CUDA backend";

template <class Args, class Subject>
PlanFunction<Args> find_plan(const Subject&, std::string& why) {
  why = reason;
  return nullptr;
}

}  // namespace

const Backend cuda_backend = {
    .name = "cuda",
    .device = Device::cuda,
    .info = [] { return BackendInfo{"cuda", false, reason}; },
    .find_forward = find_plan<ForwardArgs, Problem>,
    .find_backward = find_plan<BackwardArgs, Problem>,
    .find_score_projection = find_plan<ScoreProjectionArgs, ScoreProjectionArgs>,
    .kernels = [] { return std::vector<std::string>(); },
};

}  // namespace flash_dmattn
