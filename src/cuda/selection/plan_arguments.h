#pragma once

#include <cstdint>
#include <string>

#include "arguments.h"
#include "cuda/selection/device.cuh"
#include "cuda/selection/plan_lists.cuh"

// What build_plan and assign_slots ask of their arguments.
namespace flash_dmattn::cuda {

inline std::int64_t tile_count(const PlanArgs& args) {
  return ceil_div(args.seqlen_q, args.tile_rows);
}

inline void validate_plan_args(const PlanArgs& args) {
  require_length("batch", args.batch);
  require_length("heads", args.heads);
  require_length("batch * heads", args.batch * args.heads);
  require_length("seqlen_q", args.seqlen_q);
  require_length("seqlen_k", args.seqlen_k);
  if (args.tile_rows < 1) {
    throw InvalidArgument("tile_rows", std::to_string(args.tile_rows), "at least 1");
  }
  if (tile_count(args) > plan::max_tiles) {
    throw InvalidArgument("tile_rows", std::to_string(args.tile_rows),
                          "at most " + std::to_string(plan::max_tiles) + " tiles");
  }
  if (reinterpret_cast<std::uintptr_t>(args.intervals.data) % sizeof(KeyInterval) != 0) {
    throw InvalidArgument("intervals", "a misaligned address", "an address aligned to 8 bytes");
  }
}

}  // namespace flash_dmattn::cuda
