#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "common/arguments.h"
#include "cuda/selection/device.cuh"

namespace flash_dmattn::cuda {

// Checks the arguments of build_tile_lists, measure_key_bound and assign_slots.
inline void validate_tile_list_args(const TileListArgs& args) {
  require_length("batch", args.batch);
  require_length("heads", args.heads);
  require_length("batch * heads", args.batch * args.heads);
  require_length("seqlen_q", args.seqlen_q);
  require_length("seqlen_k", args.seqlen_k);
  require_range("tile_rows", args.tile_rows, 1, std::numeric_limits<std::int32_t>::max());
  constexpr std::int64_t max_tiles = std::numeric_limits<std::int32_t>::max() / 2;
  if (args.tiles() > max_tiles) {  // half tiles are numbered in 31 bits
    throw InvalidArgument("tile_rows", std::to_string(args.tile_rows),
                          "at most " + std::to_string(max_tiles) + " tiles");
  }
  require_aligned("intervals", args.intervals.data, sizeof(KeyInterval));
}

}  // namespace flash_dmattn::cuda
