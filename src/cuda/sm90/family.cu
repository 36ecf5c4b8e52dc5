#include "cuda/device.h"
#include "cuda/sm90/backward/plan.h"
#include "cuda/sm90/compiled.h"
#include "cuda/sm90/forward/plan.h"
#include "family_table.h"

// The family for compute capability 9.0. It multiplies by wgmma tiles that the TMA unit or cp.async copies to shared
// memory.
namespace flash_dmattn::cuda::sm90 {
namespace {

std::string decline_device(const DeviceProperties& device) {
  if (device.compute_capability != 90) {
    return "it needs compute capability 9.0, and the GPU has " + compute_capability(device);
  }
  constexpr int needed_bytes = 227 * 1024;
  if (device.shared_bytes < needed_bytes) {
    return "it needs 227 KB of shared memory for a block";
  }
  if (!is_compiled) return "this build has no kernels for compute capability 9.0";
  return "";
}

}  // namespace
}  // namespace flash_dmattn::cuda::sm90

namespace flash_dmattn::cuda {

const Family sm90_family = {
    .name = "sm90",
    .decline_device = sm90::decline_device,
    .forward = {.decline = sm90::decline_forward,
                .plan = sm90::plan_forward,
                .names = sm90::forward_names},
    .backward = {.decline = sm90::decline_backward,
                 .plan = sm90::plan_backward,
                 .names = sm90::backward_names},
};

}  // namespace flash_dmattn::cuda
