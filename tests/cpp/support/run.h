#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "flash_dmattn/attention.h"
#include "selection/query_tile_lists.h"
#include "support/buffer.h"
#include "support/data.h"

namespace flash_dmattn::testing {

// Executions without a workspace.
Execution in_turn(int workers);     // on the calling thread, one after the other
Execution on_threads(int workers);  // a thread for each, started in descending order
Execution on_pool();                // the library's own pool, two threads, one for the process

// Tile lists and what they point to, from guarded buffers.
struct OwnedTileLists {
  QueryTileLists lists;
  GuardedBuffer begin, count, full, keys;
};
OwnedTileLists make_tile_lists(const TileListArgs& args, Execution execution);

// The schedule of `data` for a direction, in a guarded buffer of its size.
struct OwnedSchedule {
  Schedule schedule;
  GuardedBuffer memory;
};
OwnedSchedule make_schedule(const Data& data, Direction direction, std::string_view backend);

struct Wanted {
  bool dq = true;
  bool dk = true;
  bool dv = true;
  bool dbias = true;
};

struct RunOptions {
  std::string_view backend = "cpu";
  Execution execution = in_turn(1);
  bool lse_low = true;
  Wanted wanted{};
  std::byte workspace_fill{0xFF};
};

// The outputs of a problem, poisoned until something writes them.
struct Results {
  Tensor out, lse, lse_low, dq, dk, dv, dbias;
  explicit Results(const Data& data);
};

// lse or lse_low, of the type that a problem's dtype gives them.
RowValues row_values(Tensor& tensor);

// Both fill a workspace of exactly workspace_size bytes, and fail the running test when
// anything outside of the outputs' elements and the workspace was written.
void run_forward(const Data& data, const RunOptions& options, Results& results);
void run_backward(const Data& data, const RunOptions& options, Results& results);
Results run(const Data& data, const RunOptions& options);  // one after the other

}  // namespace flash_dmattn::testing
