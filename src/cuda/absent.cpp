#include "backend.h"

// Replaces the CUDA backend in a build without one. It has no kernels, and so the API calls nothing else of it.
namespace flash_dmattn {
namespace {

constexpr const char* reason = "this build has no CUDA backend";

}  // namespace

const Backend cuda_backend = {
    .name = "cuda",
    .device = Device::cuda,
    .info = [] { return BackendInfo{"cuda", false, reason}; },
    .find_kernels = [](const Problem&, Direction, std::string& why) -> const KernelSet* {
      why = reason;
      return nullptr;
    },
    .plan_forward = nullptr,
    .plan_backward = nullptr,
    .kernels = [] { return std::vector<std::string>(); },
};

}  // namespace flash_dmattn
