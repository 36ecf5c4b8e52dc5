#pragma once

#include "workspace_allocator.h"

namespace flash_dmattn::cuda {

// A warp adds 512 consecutive bytes at once: at multiples of 64 the backward takes 1 % longer.
struct DeviceWorkspaceLayout {
  static constexpr std::size_t alignment = 512;
};
using WorkspaceAllocator = BasicWorkspaceAllocator<DeviceWorkspaceLayout>;

}  // namespace flash_dmattn::cuda
