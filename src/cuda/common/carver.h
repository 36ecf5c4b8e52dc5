#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_dmattn/execution.h"

namespace flash_dmattn::cuda {

// Hands out consecutive pieces of the caller's workspace. With a null base it only counts.
class Carver {
 public:
  // Of a piece's distance from the base. A warp adds 512 consecutive bytes at once: at multiples of 64
  // the backward takes 1 % longer.
  static constexpr std::size_t alignment = 512;
  static_assert(alignment % workspace_alignment == 0);

  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(std::int64_t count) {
    char* piece = base_ == nullptr ? nullptr : base_ + used_;
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    used_ += (bytes + alignment - 1) / alignment * alignment;
    return reinterpret_cast<T*>(piece);
  }

  std::size_t used() const { return used_; }

 private:
  char* base_;
  std::size_t used_ = 0;
};

}  // namespace flash_dmattn::cuda
