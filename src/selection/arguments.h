#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "flash_dmattn/error.h"
#include "flash_dmattn/execution.h"

// The checks that select_key_intervals and build_plan share.
namespace flash_dmattn::selection {

inline void require_length(std::string_view argument, std::int64_t value) {
  if (value < 0 || value > std::numeric_limits<std::int32_t>::max()) {
    throw InvalidArgument(argument, std::to_string(value), "a length in [0, 2^31)");
  }
}

inline void require_pointer(std::string_view argument, const void* pointer, bool needed) {
  if (needed && pointer == nullptr) throw InvalidArgument(argument, "null", "a pointer");
}

inline void require_workers(const Execution& execution) {
  if (execution.workers < 1) {
    throw InvalidArgument("execution.workers", std::to_string(execution.workers), "at least 1");
  }
}

inline void require_workspace(const Execution& execution, std::size_t bytes) {
  if (execution.workspace_bytes < bytes) {
    throw InvalidArgument("execution.workspace_bytes", std::to_string(execution.workspace_bytes),
                          "at least " + std::to_string(bytes));
  }
  require_pointer("execution.workspace", execution.workspace, bytes > 0);
  const auto address = reinterpret_cast<std::uintptr_t>(execution.workspace);
  if (bytes > 0 && address % workspace_alignment != 0) {
    throw InvalidArgument(
        "execution.workspace",
        "an address " + std::to_string(address % workspace_alignment) + " bytes off alignment",
        "an address aligned to " + std::to_string(workspace_alignment) + " bytes");
  }
}

constexpr std::size_t align_up(std::size_t bytes) {
  return (bytes + workspace_alignment - 1) / workspace_alignment * workspace_alignment;
}

}  // namespace flash_dmattn::selection
