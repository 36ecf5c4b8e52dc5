#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/check_finite.h"
#include "api/validate.h"
#include "arguments.h"
#include "backend.h"
#include "flash_dmattn/calls.h"
#include "flash_dmattn/error.h"

namespace flash_dmattn {
namespace {

std::string quoted(std::string_view name) {
  std::string result(1, '"');
  return result.append(name) += '"';
}

struct Choice {
  const Backend* backend = nullptr;  // null: none can, for these reasons
  std::string reasons;
};

// The backend of that name, or with an empty one the first in the table, that supports the problem.
Choice find_backend(const Problem& problem, std::string_view name) {
  validate(problem);
  if (!name.empty()) backend_named(name);
  const auto asked = [&](const Backend& backend) { return name.empty() || backend.name == name; };
  // A reason takes memory, so backends of other devices give theirs only when none can compute the problem.
  for (const Backend* backend : backend_table()) {
    const bool here = backend->device == problem.device;
    if (asked(*backend) && here && backend->supports(problem).empty()) return {backend, ""};
  }
  Choice choice;
  for (const Backend* backend : backend_table()) {
    if (!asked(*backend)) continue;
    choice.reasons += (choice.reasons.empty() ? "" : "; ") + std::string(backend->name) + ": " +
                      backend->supports(problem);
  }
  return choice;
}

const Backend& choose_backend(const Problem& problem, std::string_view name) {
  const Choice choice = find_backend(problem, name);
  if (choice.backend == nullptr) {
    throw InvalidArgument("backend", quoted(name),
                          "one that supports the problem (" + choice.reasons + ")");
  }
  return *choice.backend;
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
  throw InvalidArgument("backend", quoted(name), known + "or \"\" for the first that can");
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
  return find_backend(problem, name).reasons;
}

// ---- Schedules -----------------------------------------------------------------------------------

namespace {

const Execution& with_workers(const Execution& execution) {
  require_workers(execution);
  return execution;
}

std::span<std::byte> workspace_of(const Execution& execution) {
  return {static_cast<std::byte*>(execution.workspace), execution.workspace_bytes};
}

}  // namespace

ScheduleCall::ScheduleCall(const Problem& problem, const Visibility& visibility,
                           Direction direction, const Execution& execution, std::string_view name)
    : backend_(&choose_backend(problem, name)),
      problem_(problem),
      visibility_(validated(problem, visibility)),
      direction_(direction),
      execution_(with_workers(execution)),
      workspace_size_(
          backend_->schedule_workspace_size(problem_, visibility_, direction_, execution_)) {}

std::size_t ScheduleCall::size() const {
  return backend_->schedule_size(problem_, visibility_, direction_, execution_);
}

Schedule ScheduleCall::build(std::span<std::byte> memory, std::span<std::byte> workspace) const {
  Execution execution = execution_;
  execution.workspace = workspace.data();
  execution.workspace_bytes = workspace.size();
  require_workspace(execution, workspace_size_);
  if (reinterpret_cast<std::uintptr_t>(memory.data()) % workspace_alignment != 0) {
    throw InvalidArgument(
        "memory", "a misaligned address",
        "an address aligned to " + std::to_string(workspace_alignment) + " bytes");
  }
  return stamped(backend_->build_schedule(problem_, visibility_, direction_, memory, execution),
                 problem_, *backend_);
}

std::size_t schedule_size(const Problem& problem, const Visibility& visibility, Direction direction,
                          const Execution& execution, std::string_view name) {
  return ScheduleCall(problem, visibility, direction, execution, name).size();
}

std::size_t schedule_workspace_size(const Problem& problem, const Visibility& visibility,
                                    Direction direction, const Execution& execution,
                                    std::string_view name) {
  return ScheduleCall(problem, visibility, direction, execution, name).workspace_size();
}

Schedule build_schedule(const Problem& problem, const Visibility& visibility, Direction direction,
                        std::span<std::byte> memory, const Execution& execution,
                        std::string_view name) {
  const ScheduleCall call(problem, visibility, direction, execution, name);
  return call.build(memory, workspace_of(execution));
}

// ---- Calls ---------------------------------------------------------------------------------------

namespace {

std::size_t workspace_size(const Backend& backend, const ForwardArgs& args,
                           const Execution& execution) {
  return backend.forward_workspace_size(args, execution);
}
std::size_t workspace_size(const Backend& backend, const BackwardArgs& args,
                           const Execution& execution) {
  return backend.backward_workspace_size(args, execution);
}
std::string kernel_name_of(const Backend& backend, const ForwardArgs& args) {
  return backend.forward_kernel(args);
}
std::string kernel_name_of(const Backend& backend, const BackwardArgs& args) {
  return backend.backward_kernel(args);
}
void compute(const Backend& backend, const ForwardArgs& args, const Execution& execution) {
  backend.forward(args, execution);
}
void compute(const Backend& backend, const BackwardArgs& args, const Execution& execution) {
  backend.backward(args, execution);
}

// Of a call whose outputs are not set yet.
template <class Args>
std::size_t size_alone(const Args& args, const Execution& execution, std::string_view name) {
  const Backend& backend = choose_backend(args.problem, name);
  require_workers(execution);
  return workspace_size(backend, with_validated_inputs(args, backend), execution);
}

}  // namespace

template <class Args>
CheckedCall<Args>::CheckedCall(const Args& args, const Execution& execution, std::string_view name)
    : backend_(&choose_backend(args.problem, name)),
      args_(validated(args, *backend_)),
      execution_(with_workers(execution)),
      workspace_size_(flash_dmattn::workspace_size(*backend_, args_, execution_)) {}

template <class Args>
std::string CheckedCall<Args>::kernel_name() const {
  return kernel_name_of(*backend_, args_);
}

template <class Args>
void CheckedCall<Args>::run(std::span<std::byte> workspace) const {
  Execution execution = execution_;
  execution.workspace = workspace.data();
  execution.workspace_bytes = workspace.size();
  require_workspace(execution, workspace_size_);
  const bool check_finite = check_finite_enabled();
  if (check_finite) check_inputs_finite(args_, execution);
  compute(*backend_, args_, execution);
  if (check_finite) check_outputs_finite(args_, execution);
}

template class CheckedCall<ForwardArgs>;
template class CheckedCall<BackwardArgs>;

std::size_t forward_workspace_size(const ForwardArgs& args, const Execution& execution,
                                   std::string_view name) {
  return size_alone(args, execution, name);
}

std::size_t backward_workspace_size(const BackwardArgs& args, const Execution& execution,
                                    std::string_view name) {
  return size_alone(args, execution, name);
}

void forward(const ForwardArgs& args, const Execution& execution, std::string_view name) {
  ForwardCall(args, execution, name).run(workspace_of(execution));
}

void backward(const BackwardArgs& args, const Execution& execution, std::string_view name) {
  BackwardCall(args, execution, name).run(workspace_of(execution));
}

}  // namespace flash_dmattn
