#pragma once

#include <cstdint>

#include "common/query_tile_lists.h"
#include "common/workspace_allocator.h"
#include "flash_dmattn/execution.h"

// The CPU's schedule consists of query tile lists, the same for both directions.
namespace flash_dmattn::cpu {

// The number of queries of a tile.
std::int64_t tile_queries(const Problem& problem);

// The tile lists of a call's intervals, as a part of its plan; none without intervals.
class ListSchedule {
 public:
  // Reads the intervals.
  ListSchedule(const Problem& problem, const Visibility& visibility, const Execution& execution);

  // Takes memory for the lists, and lends what only `build` needs.
  void place(WorkspaceAllocator& workspace);
  void build(const Execution& execution) const;
  QueryTileLists lists() const;

 private:
  TileListArgs args_;
  std::int64_t entries_ = 0;
  std::size_t build_bytes_ = 0;
  TileListBuffers buffers_;
  std::byte* build_space_ = nullptr;
};

}  // namespace flash_dmattn::cpu
