#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "selection/schedule_contents.h"

// The CPU's schedule consists of query tile lists, the same for both directions.
namespace flash_dmattn::cpu {

// The number of queries of a tile.
std::int64_t tile_queries(const Problem& problem);

std::size_t schedule_size(const Problem& problem, const Visibility& visibility, Direction direction,
                          const Execution& execution);
std::size_t schedule_workspace_size(const Problem& problem, const Visibility& visibility,
                                    Direction direction, const Execution& execution);
ScheduleContents build_schedule(const Problem& problem, const Visibility& visibility,
                                Direction direction, std::span<std::byte> memory,
                                const Execution& execution);

}  // namespace flash_dmattn::cpu
