#pragma once

#include "common/workspace_allocator.h"

namespace flash_dmattn::cuda {

// A warp adds 512 consecutive bytes at once. With sums at multiples of 64 bytes the backward takes 1 % longer.
struct DeviceWorkspaceLayout {
  static constexpr std::size_t alignment = 512;
};
using WorkspaceAllocator = BasicWorkspaceAllocator<DeviceWorkspaceLayout>;

}  // namespace flash_dmattn::cuda
