#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_dmattn/plan.h"
#include "selection/schedule_contents.h"

// The CPU's schedule consists of query tile lists, the same for both directions.
namespace flash_dmattn::cpu {

// The number of queries of a tile.
std::int64_t tile_queries(const Problem& problem);

void plan_schedule(const Problem& problem, const Visibility& visibility, const Execution& execution,
                   SchedulePlan& plan);

}  // namespace flash_dmattn::cpu
