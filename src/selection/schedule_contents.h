#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "flash_dmattn/schedule.h"

namespace flash_dmattn {

enum class ScheduleKind : std::uint8_t {
  none,
  query_tile_lists,  // for each tile of queries, the keys that it visits
  key_slots,         // for each block of slots, the sequence of keys of each slot
};

// The contents of a Schedule: the layout of its memory, and the problem it was built for, which every call checks.
struct ScheduleContents {
  ScheduleKind kind = ScheduleKind::none;
  bool serves_forward = false;
  bool serves_backward = false;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::int64_t tile_rows = 0;  // queries of a tile
  // The capacity of a tile's list in keys, or the number of slots; 0: lists are packed.
  std::int64_t capacity = 0;
  std::int64_t segments = 1;  // of slots

  // Filled in by the API.
  std::string_view backend{};
  Problem problem{};

  bool empty() const { return kind == ScheduleKind::none; }
  bool serves(Direction direction) const {
    return direction == Direction::forward ? serves_forward : serves_backward;
  }

  static ScheduleContents of(const Schedule& schedule);
  Schedule schedule() const;
};

}  // namespace flash_dmattn
