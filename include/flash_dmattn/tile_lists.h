#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_dmattn/execution.h"
#include "flash_dmattn/types.h"
#include "flash_dmattn/visibility.h"

// Tile lists for kernels outside of the library, such as those of the Triton backend: the keys that each tile of queries
// sees, for tiles of any size. The library's own calls build their lists by themselves.
namespace flash_dmattn {

// For each tile of `tile_rows` consecutive queries, the keys that at least one of them sees: first the *full* keys
// (visible to all rows), then the *partial* ones, each group by ascending position; or all keys by position, none of
// them marked as full. O(number of entries) memory.
struct QueryTileLists {
  std::int64_t tile_rows = 0;  // queries of a tile; the last one may have fewer
  std::int64_t tiles = 0;      // ceil(Sq / tile_rows)
  // Both [B|1, Hkv|1, tiles]: the list of tile t of (b, h) is keys[begin[.., t]] .. keys[begin[.., t] +
  // count[.., t]], of which the first full[.., t] are full. Dense strides, 0 for a dimension of size 1.
  const std::int64_t* begin = nullptr;
  const std::int32_t* count = nullptr;
  const std::int32_t* full = nullptr;
  const std::int32_t* keys = nullptr;  // [entries]
  std::int64_t stride_batch = 0;
  std::int64_t stride_head = 0;
};

// The arguments of build_tile_lists; the lists have the batch and heads of the intervals.
struct TileListArgs {
  std::int64_t batch = 0;  // B or 1
  std::int64_t heads = 0;  // Hkv or 1
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
  std::int64_t tile_rows = 0;
  bool causal = false;  // clips every interval to queries at or after the key
  // All keys of a tile by position, instead of those that all its queries see first.
  bool by_position = false;
  KeyIntervals intervals{};  // strides as in memory; null data: every key is visible to every query
  KeyBound bound{};          // must be known on a GPU, is not used on the CPU

  std::int64_t tiles() const { return seqlen_q / tile_rows + (seqlen_q % tile_rows != 0 ? 1 : 0); }
  std::int64_t lists() const { return batch * heads * tiles(); }
};

// The arrays that tile lists are built into.
struct TileListBuffers {
  std::int64_t* begin = nullptr;  // [batch, heads, tiles]
  std::int32_t* count = nullptr;  // [batch, heads, tiles]
  std::int32_t* full = nullptr;   // [batch, heads, tiles]
  std::int32_t* keys = nullptr;   // [entries]
};

std::size_t tile_lists_workspace_size(Device device, const TileListArgs& args,
                                      const Execution& execution);

// Number of entries of all lists. On a GPU all lists have the same capacity, which follows from the bound.
std::int64_t tile_list_entries(Device device, const TileListArgs& args, const Execution& execution);
QueryTileLists build_tile_lists(Device device, const TileListArgs& args,
                                const TileListBuffers& buffers, const Execution& execution);

// A bound that holds for consecutive tiles of args.tile_rows queries. On a GPU measure_key_bound waits for the device, as
// that of selection.h does.
std::size_t measure_workspace_size(Device device, const TileListArgs& args,
                                   const Execution& execution);
KeyBound measure_key_bound(Device device, const TileListArgs& args, const Execution& execution);

}  // namespace flash_dmattn
