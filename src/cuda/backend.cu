#include "backend.h"

#include "cuda/kv_cache/kv_cache.h"
#include "cuda/score_projection/score_projection.h"
#include "cuda/selection/selection.h"
#include "family_table.h"
#include "flash_dmattn/error.h"

// The backend "cuda": finds the family that computes a call, and calls it.
namespace flash_dmattn {
namespace cuda {
namespace {

std::span<const Family* const> capped_families() {
  const std::span<const Family* const> all = family_table;
  const std::string& cap = family_cap();
  if (cap.empty()) return all;
  std::string known;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i]->name == cap) return all.subspan(i);
    known.append(known.empty() ? "" : ", ").append(all[i]->name);
  }
  throw InvalidArgument("FLASH_DMATTN_CUDA_FAMILY", cap, known);
}

// The plans of the first kernels that compute calls of a subject, where the first member of every family is tried before
// the second member of any. Null, with the reasons, if no kernels do.
template <class Args, class Subject>
PlanFunction<Args> find_plan(const Subject& subject,
                             std::initializer_list<Kernels<Args, Subject> Family::*> members,
                             std::string& reasons) {
  const DeviceProperties& device = current_device();
  for (const auto member : members) {
    for (const Family* family : families()) {
      const Kernels<Args, Subject>& candidate = family->*member;
      if (!candidate) continue;
      std::string reason = family->decline_device(device);
      if (reason.empty()) reason = candidate.decline(subject);
      if (reason.empty()) return candidate.plan;
      reasons.append(reasons.empty() ? "" : "; ").append(family->name).append(": ");
      reasons.append(reason);
    }
  }
  return nullptr;
}

// find_plan for attention, whose problem may be in the memory of another device. Reasons begin with the direction.
template <class Args>
PlanFunction<Args> find_attention(const Problem& p, std::string_view direction,
                                  std::initializer_list<Kernels<Args> Family::*> members,
                                  std::string& reason) {
  reason = decline_other_device(p, "cuda", Device::cuda);
  if (reason.empty()) reason = decline_driver();
  if (!reason.empty()) return nullptr;
  const PlanFunction<Args> plan = find_plan(p, members, reason);
  if (plan == nullptr) reason.insert(0, direction);
  return plan;
}

PlanFunction<ForwardArgs> find_forward(const Problem& p, std::string& reason) {
  return find_attention<ForwardArgs>(p, "forward: ", {&Family::few_queries, &Family::forward},
                                     reason);
}

PlanFunction<BackwardArgs> find_backward(const Problem& p, std::string& reason) {
  return find_attention<BackwardArgs>(p, "backward: ", {&Family::backward}, reason);
}

PlanFunction<DecodeStepArgs> find_decode_step(const KvCacheShape& shape, std::string& reason) {
  reason = decline_driver();
  if (!reason.empty()) return nullptr;
  return find_plan<DecodeStepArgs, KvCacheShape>(shape, {&Family::decode_step}, reason);
}

constexpr KvBackend kv_backend = {
    .find_decode_step = find_decode_step,
    .clear = kv::clear,
    .copy_rows = kv::copy_rows,
    .fill = kv::fill,
    .append = kv::append,
    .plan_pending_intervals = kv::plan_pending_intervals,
    .plan_commit = kv::plan_commit,
};

// ---- The row of the table -------------------------------------------------------------------------------

std::vector<std::string> kernel_names() {
  std::vector<std::string> result;
  if (!decline_driver().empty()) return result;
  const DeviceProperties& device = current_device();
  const auto append = [&](const auto& kernels) {
    if (!kernels) return;
    for (std::string& name : kernels.names(device)) result.push_back(std::move(name));
  };
  for (const Family* family : families()) {
    if (!family->decline_device(device).empty()) continue;
    append(family->forward);
    append(family->few_queries);
    append(family->backward);
    append(family->decode_step);
  }
  return result;
}

BackendInfo info() {
  const std::span<const Family* const> table = families();
  if (!decline_driver().empty()) return {"cuda", false, decline_driver()};
  std::string reasons;
  for (const Family* family : table) {
    const std::string reason = family->decline_device(current_device());
    if (reason.empty()) return {"cuda", true, device_name()};
    reasons.append(reasons.empty() ? "" : "; ").append(family->name).append(": ").append(reason);
  }
  return {"cuda", false, reasons};
}

}  // namespace

std::span<const Family* const> families() {
  static const std::span<const Family* const> capped = capped_families();
  return capped;
}

}  // namespace cuda

const Backend cuda_backend = {
    .name = "cuda",
    .device = Device::cuda,
    .info = cuda::info,
    .find_forward = cuda::find_forward,
    .find_backward = cuda::find_backward,
    .find_score_projection = cuda::find_score_projection,
    .kernels = cuda::kernel_names,
    .selection = &cuda::selection_backend,
    .kv = &cuda::kv_backend,
};

}  // namespace flash_dmattn
