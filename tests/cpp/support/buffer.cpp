#include "support/buffer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "flash_dmattn/execution.h"

namespace flash_dmattn::testing {
namespace {

constexpr std::byte guard{0xA5};

}  // namespace

GuardedBuffer::GuardedBuffer(std::size_t bytes, std::string_view name)
    : storage_(bytes + 2 * guard_bytes + workspace_alignment, guard), size_(bytes), name_(name) {
  const auto address = reinterpret_cast<std::uintptr_t>(storage_.data()) + guard_bytes;
  const std::size_t misaligned = address % workspace_alignment;
  data_ = storage_.data() + guard_bytes + (misaligned == 0 ? 0 : workspace_alignment - misaligned);
  poison();
}

GuardedBuffer::~GuardedBuffer() {
  EXPECT_TRUE(guards_intact()) << "written outside of " << name_ << " (" << size_ << " bytes)";
}

void GuardedBuffer::poison() {
  if (size_ > 0) std::memset(data_, 0xFF, size_);
}

bool GuardedBuffer::guards_intact() const {
  const auto is_guard = [](std::byte value) { return value == guard; };
  const std::byte* end = storage_.data() + storage_.size();
  return storage_.empty() || (std::all_of<const std::byte*>(storage_.data(), data_, is_guard) &&
                              std::all_of<const std::byte*>(data_ + size_, end, is_guard));
}

}  // namespace flash_dmattn::testing
