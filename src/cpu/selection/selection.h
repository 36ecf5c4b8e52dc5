#pragma once

#include "backend.h"
#include "common/query_tile_lists.h"
#include "flash_dmattn/selection.h"

// Selection and tile lists in host memory.
namespace flash_dmattn::cpu {

extern const SelectionBackend selection_backend;  // select.cpp

std::size_t tile_lists_workspace_size(const TileListArgs& args, const Execution& execution);

// The number of keys in all lists. Reads the intervals in O(Sk + tiles) per row.
std::int64_t tile_list_entries(const TileListArgs& args, const Execution& execution);

// Builds the lists one after another, in parallel and O(entries + Sk) time, and returns a view of them. The result does
// not depend on the number of workers. `capacity` is the number of keys that fit into buffers.keys.
QueryTileLists build_tile_lists(const TileListArgs& args, const TileListBuffers& buffers,
                                std::int64_t capacity, const Execution& execution);

// Measures a bound that holds for consecutive tiles.
std::size_t measure_workspace_size(const TileListArgs& args, const Execution& execution);
KeyBound measure_key_bound(const TileListArgs& args, const Execution& execution);

}  // namespace flash_dmattn::cpu
