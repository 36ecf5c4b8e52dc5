#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "flash_dmattn/execution.h"

namespace flash_dmattn {

// Where pieces of a workspace begin: at multiples of `alignment` from its base. Code that is compiled for an
// instruction set has a layout type of its own, so that its instantiations are its own, too.
struct HostWorkspaceLayout {
  static constexpr std::size_t alignment = workspace_alignment;
};

// Hands out consecutive pieces of memory that the caller owns. With a null base it only counts, so that one
// function both sizes a workspace and lays it out.
template <class Layout>
class BasicWorkspaceAllocator {
 public:
  static_assert(Layout::alignment % workspace_alignment == 0);

  explicit BasicWorkspaceAllocator(void* base) : base_(static_cast<std::byte*>(base)) {}

  // `count` elements, uninitialised.
  template <class T>
  T* take(std::int64_t count) {
    std::byte* const piece = base_ == nullptr ? nullptr : base_ + used_;
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    used_ += (bytes + Layout::alignment - 1) / Layout::alignment * Layout::alignment;
    return reinterpret_cast<T*>(piece);
  }

  // `bytes` that the pieces taken later overlap, for work that ends before those are written.
  std::byte* lend(std::size_t bytes) {
    most_ = std::max(most_, used_ + bytes);
    return base_ == nullptr ? nullptr : base_ + used_;
  }

  std::size_t used() const { return used_; }
  // The size of the workspace, with memory that was lent.
  std::size_t bytes() const { return std::max(used_, most_); }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
  std::size_t most_ = 0;
};

using WorkspaceAllocator = BasicWorkspaceAllocator<HostWorkspaceLayout>;

}  // namespace flash_dmattn
