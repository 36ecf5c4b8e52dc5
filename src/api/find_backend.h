#pragma once

#include <string>
#include <string_view>

#include "backend.h"
#include "flash_dmattn/error.h"

// The search for the backend of a call.
namespace flash_dmattn {

template <class Args>
struct FoundBackend {
  const Backend* backend = nullptr;
  PlanFunction<Args> plan = nullptr;  // null: no backend computes such calls, for these reasons
  std::string reasons;
};

// The backend of that name, or with an empty one the first in the table, that computes such calls on a device.
// `find_plan(backend, reason)` returns the function that plans them, or null and the reason.
template <class Args, class FindPlan>
FoundBackend<Args> search_backends(Device device, std::string_view name,
                                   const FindPlan& find_plan) {
  if (!name.empty()) backend_named(name);
  const auto is_candidate = [&](const Backend& b) { return name.empty() || b.name == name; };
  // A reason takes memory, so backends of other devices give theirs only when none computes the call.
  std::string reason;
  for (const Backend* backend : backend_table()) {
    if (!is_candidate(*backend) || backend->device != device) continue;
    const PlanFunction<Args> plan = find_plan(*backend, reason);
    if (plan != nullptr) return {backend, plan, ""};
  }
  FoundBackend<Args> none;
  for (const Backend* backend : backend_table()) {
    if (!is_candidate(*backend)) continue;
    reason.clear();
    find_plan(*backend, reason);
    none.reasons += (none.reasons.empty() ? "" : "; ") + std::string(backend->name) + ": " + reason;
  }
  return none;
}

inline std::string quoted(std::string_view name) {
  std::string result(1, '"');
  return result.append(name) += '"';
}

// Returns what was found. Throws InvalidArgument, which states `expected` and the reasons, if no backend was.
template <class Args>
FoundBackend<Args> require_backend(FoundBackend<Args> found, std::string_view name,
                                   std::string_view expected) {
  if (found.plan == nullptr) {
    throw InvalidArgument("backend", quoted(name),
                          std::string(expected) + " (" + found.reasons + ")");
  }
  return found;
}

}  // namespace flash_dmattn
