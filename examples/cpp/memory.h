#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "flash_dmattn/execution.h"

// Memory as the library needs it; it grows to the largest requested piece.
class Memory {
 public:
  std::span<std::byte> of(std::size_t bytes) {
    lines_.resize(std::max(lines_.size(), (bytes + sizeof(Line) - 1) / sizeof(Line)));
    return std::as_writable_bytes(std::span(lines_)).first(bytes);
  }

 private:
  struct alignas(flash_dmattn::workspace_alignment) Line {
    std::byte bytes[flash_dmattn::workspace_alignment];
  };
  std::vector<Line> lines_;
};
