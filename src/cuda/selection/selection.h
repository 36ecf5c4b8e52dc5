#pragma once

#include <cstddef>
#include <cstdint>

#include "backend.h"
#include "common/query_tile_lists.h"
#include "flash_dmattn/execution.h"
#include "flash_dmattn/selection.h"

// Selection and tile lists on the GPU. The results equal those of the functions of the same names in
// flash_dmattn/selection.h and cpu/selection/selection.h, with arrays in device memory. Every call enqueues kernels on
// execution.stream and returns. It allocates nothing, does not wait for the device, and can be captured in a CUDA
// graph. All sizes follow from shapes and TileListArgs::bound. Bad arguments throw InvalidArgument, and failures of the
// CUDA runtime std::runtime_error.
namespace flash_dmattn::cuda {

extern const SelectionBackend selection_backend;  // select.cu

// ---- Selection ----------------------------------------------------------------------------------

// Throws InvalidArgument unless a GPU can sort the scores, which are f32, bf16 or f16, with Sk <= 2^23.
void require_sortable(const SelectionArgs& args);

// ---- Query tile lists ---------------------------------------------------------------------------

// The length of a tile's list, a multiple of tile_list_block. The list of tile t of row r begins at
// (r * tiles + t) * tile_list_capacity.
//
// From count up to the next multiple of tile_list_block a list is filled with key 0, so that blocks of keys can be
// loaded without a test of each index.
//
// Both groups of a list ascend, so n entries of one group are consecutive positions exactly if keys[n - 1] - keys[0] ==
// n - 1. Sliding windows and packed documents therefore need no search for runs.
inline constexpr std::int64_t tile_list_block = 128;
std::int64_t tile_list_capacity(const TileListArgs& args);

std::size_t tile_lists_workspace_size(const TileListArgs& args);

// If the intervals break the bound, lists lose keys, but nothing outside the buffers is written.
QueryTileLists build_tile_lists(const TileListArgs& args, const TileListBuffers& buffers,
                                const Execution& execution);

// measure_key_bound is the only function here that waits for the device.
std::size_t measure_workspace_size(const TileListArgs& args);
KeyBound measure_key_bound(const TileListArgs& args, const Execution& execution);

}  // namespace flash_dmattn::cuda
