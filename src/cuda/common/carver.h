#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_dmattn/execution.h"

namespace flash_dmattn::cuda {

// Hands out consecutive aligned pieces of the caller's workspace. With a null base it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(std::int64_t count) {
    char* piece = base_ == nullptr ? nullptr : base_ + used_;
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    used_ += (bytes + workspace_alignment - 1) / workspace_alignment * workspace_alignment;
    return reinterpret_cast<T*>(piece);
  }

  std::size_t used() const { return used_; }

 private:
  char* base_;
  std::size_t used_ = 0;
};

}  // namespace flash_dmattn::cuda
