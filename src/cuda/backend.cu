#include "backend.h"

#include "cuda/kv_cache/kv_cache.h"
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

// The first kernels that compute a problem, where the first member of every family is tried before the second member of
// any. Null, with the reasons, if no kernels do.
template <class Args>
const Kernels<Args>* find_kernels(const Problem& p,
                                  std::initializer_list<Kernels<Args> Family::*> members,
                                  std::string& reasons) {
  const DeviceProperties& device = current_device();
  for (const auto member : members) {
    for (const Family* family : families()) {
      const Kernels<Args>& candidate = family->*member;
      if (!candidate) continue;
      std::string reason = family->decline_device(device);
      if (reason.empty()) reason = candidate.decline(p);
      if (reason.empty()) return &candidate;
      reasons.append(reasons.empty() ? "" : "; ").append(family->name).append(": ");
      reasons.append(reason);
    }
  }
  return nullptr;
}

// The kernels as the API knows them.
template <class Kernels>
const KernelSet* set_of(const Kernels* kernels) {
  return reinterpret_cast<const KernelSet*>(kernels);
}
template <class Kernels>
const Kernels& kernels_of(const KernelSet& set) {
  return reinterpret_cast<const Kernels&>(set);
}

const KernelSet* find_kernels(const Problem& p, Direction direction, std::string& reason) {
  reason = decline_other_device(p, "cuda", Device::cuda);
  if (reason.empty()) reason = decline_driver();
  if (!reason.empty()) return nullptr;
  const bool forward = direction == Direction::forward;
  const KernelSet* const set =
      forward
          ? set_of(find_kernels<ForwardArgs>(p, {&Family::few_queries, &Family::forward}, reason))
          : set_of(find_kernels<BackwardArgs>(p, {&Family::backward}, reason));
  if (set == nullptr) reason.insert(0, forward ? "forward: " : "backward: ");
  return set;
}

template <class Args>
void plan_attention(const KernelSet& set, const Args& args, const Execution&, Plan<Args>& plan) {
  kernels_of<Kernels<Args>>(set).plan(args, current_device(), plan);
}

// ---- KV caches ------------------------------------------------------------------------------------------

// The decode step of the first family that supports a cache.
const KernelSet* find_step(const KvCacheShape& shape, std::string& reason) {
  reason = decline_driver();
  if (!reason.empty()) return nullptr;
  for (const Family* family : families()) {
    if (!family->decode_step) continue;
    std::string declined = family->decline_device(current_device());
    if (declined.empty()) declined = family->decode_step.decline(shape);
    if (declined.empty()) return set_of(&family->decode_step);
    reason.append(reason.empty() ? "" : "; ").append(family->name).append(": ").append(declined);
  }
  return nullptr;
}

constexpr KvBackend kv_backend = {
    .find_kernels = find_step,
    .clear = kv::clear,
    .copy_rows = kv::copy_rows,
    .fill = kv::fill,
    .append = kv::append,
    .plan_pending_intervals = kv::plan_pending_intervals,
    .plan_commit = kv::plan_commit,
    .plan_decode_step =
        [](const KernelSet& set, const DecodeStepArgs& args, const Execution&,
           Plan<DecodeStepArgs>& plan) {
          kernels_of<DecodeStep>(set).plan(args, current_device(), plan);
        },
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
    .find_kernels = cuda::find_kernels,
    .plan_forward = cuda::plan_attention<ForwardArgs>,
    .plan_backward = cuda::plan_attention<BackwardArgs>,
    .kernels = cuda::kernel_names,
    .selection = &cuda::selection_backend,
    .kv = &cuda::kv_backend,
};

}  // namespace flash_dmattn
