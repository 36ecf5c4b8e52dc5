#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "flash_dmattn/schedule.h"

namespace flash_dmattn {

enum class ScheduleKind : std::uint8_t {
  none,
  query_tile_lists,  // of each tile of queries, the keys that it visits
  key_list_tiles,    // of each tile of queries, how much of its row's KeyList it visits
  key_slots,         // of each block of slots, the keys that live in them one after the other
};

// The contents of a Schedule: how its memory is read, and what it was built for, which every call checks.
struct ScheduleContents {
  ScheduleKind kind = ScheduleKind::none;
  bool serves_forward = false;
  bool serves_backward = false;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::int64_t tile_rows = 0;  // queries of a tile
  // Keys that a tile's list has room for, or slots, or the stride of the KeyList; 0: lists are packed.
  std::int64_t capacity = 0;
  std::int64_t segments = 1;           // of slots
  const std::int32_t* keys = nullptr;  // of the KeyList

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
