#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_dmattn/schedule.h"
#include "flash_dmattn/tile_lists.h"
#include "workspace_allocator.h"

// The schedule of kernels that iterate over the keys of a tile of queries.
namespace flash_dmattn {

// The maximum number of tiles of a row for which a GPU builds a schedule: half tiles are numbered in 16 bits.
inline constexpr std::int64_t max_query_tiles = 0x7fff;

// The arrays of a schedule, one after the other, and their bytes.
TileListBuffers take_tile_lists(ScheduleAllocator& memory, std::int64_t lists,
                                std::int64_t entries);
std::size_t tile_list_bytes(std::int64_t lists, std::int64_t entries);

// The view of the lists in `buffers`.
QueryTileLists view_of(const TileListBuffers& buffers, const TileListArgs& args);

// Arguments for the tile lists of a problem's intervals.
TileListArgs tile_list_args(const Problem& problem, const Visibility& visibility,
                            std::int64_t tile_rows);

// The lists of a schedule; none if it is empty. Throws InvalidArgument for tiles of other than `tile_rows` queries.
QueryTileLists query_tile_lists(const Schedule& schedule, std::int64_t tile_rows);

}  // namespace flash_dmattn
