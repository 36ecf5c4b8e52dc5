#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "arguments.h"
#include "backend.h"
#include "check_finite.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/error.h"
#include "validate.h"

namespace flash_dmattn {
namespace {

std::string quoted(std::string_view name) {
  std::string result(1, '"');
  return result.append(name) += '"';
}

void require_known(std::string_view name) {
  for (const Backend* backend : backend_table()) {
    if (backend->name == name) return;
  }
  std::string known;
  for (const Backend* backend : backend_table()) known += quoted(backend->name) + ", ";
  throw InvalidArgument("backend", quoted(name), known + "or \"\" for the first that can");
}

struct Choice {
  const Backend* backend = nullptr;  // null: none can, for these reasons
  std::string reasons;
};

// The backend of that name, or with an empty one the first in the table, that supports the problem.
Choice find_backend(const Problem& problem, std::string_view name) {
  validate(problem);
  if (!name.empty()) require_known(name);
  const auto asked = [&](const Backend& backend) { return name.empty() || backend.name == name; };
  // A reason takes memory, so those that compute elsewhere are asked for theirs only when none can.
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

float default_scale(std::int64_t head_dim) { return 1 / std::sqrt(static_cast<float>(head_dim)); }

std::span<const Backend* const> backend_table() {
  static constexpr std::array<const Backend*, 3> table = {&cuda_backend, &cpu_backend,
                                                          &reference_backend};
  return table;
}

std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> result;
  for (const Backend* backend : backend_table()) result.push_back(backend->info());
  return result;
}

std::string supports(const Problem& problem, std::string_view name) {
  return find_backend(problem, name).reasons;
}

std::int64_t query_tile_rows(const Problem& problem, std::string_view name) {
  return choose_backend(problem, name).query_tile_rows(problem);
}

bool wants_plan(const Problem& problem, const KeyBound& bound, std::string_view name) {
  return choose_backend(problem, name).wants_plan(problem, bound);
}

std::size_t forward_workspace_size(const ForwardArgs& args, const Execution& execution,
                                   std::string_view name) {
  const Backend& backend = choose_backend(args.problem, name);
  require_workers(execution);
  ForwardArgs checked = args;
  checked.in = validated(args.problem, args.in, backend);
  return backend.forward_workspace_size(checked, execution);
}

std::size_t backward_workspace_size(const BackwardArgs& args, const Execution& execution,
                                    std::string_view name) {
  const Backend& backend = choose_backend(args.problem, name);
  require_workers(execution);
  BackwardArgs checked = args;
  checked.in = validated(args.problem, args.in, backend);
  return backend.backward_workspace_size(checked, execution);
}

void forward(const ForwardArgs& args, const Execution& execution, std::string_view name) {
  const Backend& backend = choose_backend(args.problem, name);
  require_workers(execution);
  const ForwardArgs checked = validated(args, backend);
  require_workspace(execution, backend.forward_workspace_size(checked, execution));
  const bool check_finite = check_finite_enabled();
  if (check_finite) check_inputs_finite(checked, execution);
  backend.forward(checked, execution);
  if (check_finite) check_outputs_finite(checked, execution);
}

void backward(const BackwardArgs& args, const Execution& execution, std::string_view name) {
  const Backend& backend = choose_backend(args.problem, name);
  require_workers(execution);
  const BackwardArgs checked = validated(args, backend);
  require_workspace(execution, backend.backward_workspace_size(checked, execution));
  const bool check_finite = check_finite_enabled();
  if (check_finite) check_inputs_finite(checked, execution);
  backend.backward(checked, execution);
  if (check_finite) check_outputs_finite(checked, execution);
}

}  // namespace flash_dmattn
