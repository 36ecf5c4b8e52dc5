#include "cuda/device.h"
#include "cuda/sm80/backward/plan.h"
#include "cuda/sm80/few_queries/few_queries.h"
#include "cuda/sm80/forward/plan.h"
#include "cuda/sm80/kernel_choice.h"
#include "family_table.h"
#include "sm80/compiled.h"

// The family for every GPU since Ampere. It multiplies by mma.sync tiles that cp.async copies to shared memory.
namespace flash_dmattn::cuda::sm80 {
namespace {

std::string decline_device(const DeviceProperties& device) {
  if (device.compute_capability < 80) {
    return "it needs compute capability 8.0, and the GPU has " + compute_capability(device);
  }
  if (!has_kernels(shared_class(device))) {
    return "this build has no kernels for a GPU with " +
           std::to_string(device.shared_bytes / 1024) + " KB of shared memory for a block";
  }
  return "";
}

}  // namespace
}  // namespace flash_dmattn::cuda::sm80

namespace flash_dmattn::cuda {

const Family sm80_family = {
    .name = "sm80",
    .decline_device = sm80::decline_device,
    .forward = {.decline = sm80::decline_forward,
                .plan = sm80::plan_forward,
                .names = sm80::forward_names},
    .few_queries = {.decline = sm80::few_queries::decline,
                    .plan = sm80::few_queries::plan_split,
                    .names = sm80::few_queries::split_names},
    .backward = {.decline = sm80::decline_backward,
                 .plan = sm80::plan_backward,
                 .names = sm80::backward_names},
    .decode_step = {.decline = sm80::few_queries::decline_cache,
                    .plan = sm80::few_queries::plan_step,
                    .names = sm80::few_queries::step_names},
};

}  // namespace flash_dmattn::cuda
