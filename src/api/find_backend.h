#pragma once

#include <string>
#include <string_view>

#include "backend.h"
#include "flash_dmattn/error.h"

// The search for the backend of a call.
namespace flash_dmattn {

struct FoundBackend {
  const Backend* backend = nullptr;
  const KernelSet* kernels = nullptr;  // null: no backend has them, for these reasons
  std::string reasons;
};

// The backend of that name, or with an empty one the first in the table, that has kernels on a device.
// `find_kernels(backend, reason)` returns the kernels, or null and the reason.
template <class FindKernels>
FoundBackend find_backend(Device device, std::string_view name, const FindKernels& find_kernels) {
  if (!name.empty()) backend_named(name);
  const auto is_candidate = [&](const Backend& b) { return name.empty() || b.name == name; };
  // A reason takes memory, so backends of other devices give theirs only when none has kernels.
  std::string reason;
  for (const Backend* backend : backend_table()) {
    if (!is_candidate(*backend) || backend->device != device) continue;
    const KernelSet* const kernels = find_kernels(*backend, reason);
    if (kernels != nullptr) return {backend, kernels, ""};
  }
  FoundBackend none;
  for (const Backend* backend : backend_table()) {
    if (!is_candidate(*backend)) continue;
    reason.clear();
    find_kernels(*backend, reason);
    none.reasons += (none.reasons.empty() ? "" : "; ") + std::string(backend->name) + ": " + reason;
  }
  return none;
}

inline std::string quoted(std::string_view name) {
  std::string result(1, '"');
  return result.append(name) += '"';
}

// Throws InvalidArgument, which states `expected` and the reasons, if no backend was found.
inline void require_backend(const FoundBackend& found, std::string_view name,
                            std::string_view expected) {
  if (found.kernels != nullptr) return;
  throw InvalidArgument("backend", quoted(name),
                        std::string(expected) + " (" + found.reasons + ")");
}

}  // namespace flash_dmattn
