#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/checked_call.h"
#include "api/find_backend.h"
#include "api/validate.h"
#include "backend.h"
#include "common/arguments.h"
#include "flash_dmattn/calls.h"
#include "flash_dmattn/error.h"

namespace flash_dmattn {
namespace {

template <class Args>
using FindPlan = PlanFunction<Args> (*)(const Problem&, std::string& reason);

// The backend that computes a validated problem; `find_plan` is the member of a direction.
template <class Args>
FoundBackend<Args> backend_for(const Problem& problem, std::string_view name,
                               FindPlan<Args> Backend::* find_plan) {
  return search_backends<Args>(problem.device, name,
                               [&](const Backend& backend, std::string& reason) {
                                 return (backend.*find_plan)(problem, reason);
                               });
}

template <class Args>
Args plan_attention(const Args& args, const Execution& execution, std::string_view name,
                    FindPlan<Args> Backend::* find_plan, Plan<Args>& plan) {
  validate(args.problem);
  const auto found = require_backend(backend_for(args.problem, name, find_plan), name,
                                     "one that supports the problem");
  Args valid = validated(args);
  found.plan(valid, execution, plan);
  return valid;
}

}  // namespace

double default_scale(std::int64_t head_dim) { return 1 / std::sqrt(static_cast<double>(head_dim)); }

std::span<const Backend* const> backend_table() {
  static constexpr std::array<const Backend*, 3> table = {&cuda_backend, &cpu_backend,
                                                          &reference_backend};
  return table;
}

const Backend& backend_named(std::string_view name) {
  for (const Backend* backend : backend_table()) {
    if (backend->name == name) return *backend;
  }
  std::string known;
  for (const Backend* backend : backend_table()) known += quoted(backend->name) + ", ";
  throw InvalidArgument("backend", quoted(name),
                        known + "or \"\" for the first that supports the problem");
}

std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> result;
  for (const Backend* backend : backend_table()) result.push_back(backend->info());
  return result;
}

std::vector<std::string> kernel_names(std::string_view name) {
  return backend_named(name).kernels();
}

std::string supports(const Problem& problem, std::string_view name) {
  validate(problem);
  std::string reasons = backend_for(problem, name, &Backend::find_forward).reasons;
  return reasons.empty() ? backend_for(problem, name, &Backend::find_backward).reasons : reasons;
}

const Backend& backend_of(Device device) {
  if (device > Device::cuda) {
    throw InvalidArgument("device", std::to_string(static_cast<int>(device)), "cpu or cuda");
  }
  std::string reason;
  for (const Backend* backend : backend_table()) {
    if (backend->device != device) continue;
    if (backend->selection != nullptr) return *backend;
    reason = backend->info().reason;
  }
  throw InvalidArgument("device", name_of(device), "cpu: " + reason);
}

// ---- Attention -----------------------------------------------------------------------------------

ForwardArgs plan_call(const ForwardArgs& args, const Execution& execution, std::string_view name,
                      Plan<ForwardArgs>& plan) {
  return plan_attention(args, execution, name, &Backend::find_forward, plan);
}

BackwardArgs plan_call(const BackwardArgs& args, const Execution& execution, std::string_view name,
                       Plan<BackwardArgs>& plan) {
  return plan_attention(args, execution, name, &Backend::find_backward, plan);
}

template class CheckedCall<ForwardArgs>;
template class CheckedCall<BackwardArgs>;

void forward(const ForwardArgs& args, const Execution& execution, std::string_view name) {
  ForwardCall(args, execution, name).run(workspace_of(execution));
}

void backward(const BackwardArgs& args, const Execution& execution, std::string_view name) {
  BackwardCall(args, execution, name).run(workspace_of(execution));
}

}  // namespace flash_dmattn
