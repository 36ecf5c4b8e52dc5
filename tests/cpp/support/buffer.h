#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

namespace flash_dmattn::testing {

// Memory between two guards. It starts out poisoned: 0xFF bytes, a NaN in every floating-point format
// and -1 in every integer. The destructor fails the running test if a guard has changed.
class GuardedBuffer {
 public:
  GuardedBuffer() : GuardedBuffer(0, "nothing") {}
  GuardedBuffer(std::size_t bytes, std::string_view name);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer&&) noexcept = default;
  GuardedBuffer& operator=(GuardedBuffer&&) noexcept = default;

  std::byte* data() { return data_; }  // aligned to workspace_alignment
  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  operator std::span<std::byte>() { return {data_, size_}; }

  void poison();
  bool guards_intact() const;

 private:
  static constexpr std::size_t guard_bytes = 256;

  std::vector<std::byte> storage_;
  std::byte* data_;
  std::size_t size_;
  std::string_view name_;
};

}  // namespace flash_dmattn::testing
