#include "backend.h"

// Replaces the CUDA backend in a build without CUDA. It declines every call, so that the API never calls its other
// members.
namespace flash_dmattn {
namespace {

constexpr const char* reason = "this build has no CUDA backend";

template <class Args>
PlanFunction<Args> find_plan(const Problem&, std::string& why) {
  why = reason;
  return nullptr;
}

}  // namespace

const Backend cuda_backend = {
    .name = "cuda",
    .device = Device::cuda,
    .info = [] { return BackendInfo{"cuda", false, reason}; },
    .find_forward = find_plan<ForwardArgs>,
    .find_backward = find_plan<BackwardArgs>,
    .kernels = [] { return std::vector<std::string>(); },
};

}  // namespace flash_dmattn
