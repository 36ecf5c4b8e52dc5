#pragma once

#include <array>
#include <cstddef>
#include <string>

#include "flash_dmattn/execution.h"

// A plan is the decision of a backend, made once, before the caller allocates memory: the kernel, and the layout of the
// workspace. Its content is internal to the library. It is a value that holds no pointers except those
// of the call's arguments, so a copy is as good as the original.
namespace flash_dmattn {

// A plan may hold tensor maps, which the GPU reads at addresses aligned to 64 bytes and CUDA 13 declares with 128.
inline constexpr std::size_t plan_alignment = 128;

template <class Args>
struct Plan {
  std::size_t workspace_size = 0;
  std::string (*kernel_name)(const Plan&) = nullptr;
  // Adds the address of the workspace and computes.
  void (*run)(const Plan&, const Args&, const Execution&) = nullptr;
  alignas(plan_alignment) std::array<std::byte, 4608> content;  // of the backend's own type
};

}  // namespace flash_dmattn
