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
#include "arguments.h"
#include "backend.h"
#include "flash_dmattn/calls.h"
#include "flash_dmattn/error.h"

namespace flash_dmattn {
namespace {

// The backend that computes a validated problem in a direction.
FoundBackend find_backend(const Problem& problem, Direction direction, std::string_view name) {
  return find_backend(problem.device, name, [&](const Backend& backend, std::string& reason) {
    return backend.find_kernels(problem, direction, reason);
  });
}

FoundBackend choose_backend(const Problem& problem, Direction direction, std::string_view name) {
  validate(problem);
  const FoundBackend found = find_backend(problem, direction, name);
  require_backend(found, name, "one that supports the problem");
  return found;
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
  std::string reasons = find_backend(problem, Direction::forward, name).reasons;
  return reasons.empty() ? find_backend(problem, Direction::backward, name).reasons : reasons;
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

namespace {

void plan_with(const FoundBackend& found, const ForwardArgs& args, const Execution& execution,
               Plan<ForwardArgs>& plan) {
  found.backend->plan_forward(*found.kernels, args, execution, plan);
}
void plan_with(const FoundBackend& found, const BackwardArgs& args, const Execution& execution,
               Plan<BackwardArgs>& plan) {
  found.backend->plan_backward(*found.kernels, args, execution, plan);
}

// The workspace of a call whose outputs are not set yet.
template <class Args>
std::size_t size_alone(const Args& args, Direction direction, const Execution& execution,
                       std::string_view name) {
  const FoundBackend found = choose_backend(args.problem, direction, name);
  require_workers(execution);
  Plan<Args> plan;
  plan_with(found, with_validated_inputs(args), execution, plan);
  return plan.workspace_size;
}

template <class Args>
Args plan_attention(const Args& args, Direction direction, const Execution& execution,
                    std::string_view name, Plan<Args>& plan) {
  const FoundBackend found = choose_backend(args.problem, direction, name);
  Args valid = validated(args);
  plan_with(found, valid, execution, plan);
  return valid;
}

}  // namespace

ForwardArgs plan_call(const ForwardArgs& args, const Execution& execution, std::string_view name,
                      Plan<ForwardArgs>& plan) {
  return plan_attention(args, Direction::forward, execution, name, plan);
}

BackwardArgs plan_call(const BackwardArgs& args, const Execution& execution, std::string_view name,
                       Plan<BackwardArgs>& plan) {
  return plan_attention(args, Direction::backward, execution, name, plan);
}

template class CheckedCall<ForwardArgs>;
template class CheckedCall<BackwardArgs>;

std::size_t forward_workspace_size(const ForwardArgs& args, const Execution& execution,
                                   std::string_view name) {
  return size_alone(args, Direction::forward, execution, name);
}

std::size_t backward_workspace_size(const BackwardArgs& args, const Execution& execution,
                                    std::string_view name) {
  return size_alone(args, Direction::backward, execution, name);
}

void forward(const ForwardArgs& args, const Execution& execution, std::string_view name) {
  ForwardCall(args, execution, name).run(workspace_of(execution));
}

void backward(const BackwardArgs& args, const Execution& execution, std::string_view name) {
  BackwardCall(args, execution, name).run(workspace_of(execution));
}

}  // namespace flash_dmattn
