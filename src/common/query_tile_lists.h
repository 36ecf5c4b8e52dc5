#pragma once

#include <cstddef>
#include <cstdint>

#include "common/workspace_allocator.h"
#include "flash_dmattn/problem.h"
#include "flash_dmattn/tile_lists.h"

// Tile lists as the schedule of kernels that iterate over the keys of a tile of queries.
namespace flash_dmattn {

// The arrays of tile lists in a workspace.
template <class Layout>
TileListBuffers take_tile_lists(BasicWorkspaceAllocator<Layout>& workspace, std::int64_t lists,
                                std::int64_t entries) {
  return {.begin = workspace.template take<std::int64_t>(lists),
          .count = workspace.template take<std::int32_t>(lists),
          .full = workspace.template take<std::int32_t>(lists),
          .keys = workspace.template take<std::int32_t>(entries)};
}

// The view of the lists in `buffers`.
QueryTileLists view_of(const TileListBuffers& buffers, const TileListArgs& args);

// Arguments for the tile lists of a problem's intervals.
TileListArgs tile_list_args(const Problem& problem, const Visibility& visibility,
                            std::int64_t tile_rows);

}  // namespace flash_dmattn
