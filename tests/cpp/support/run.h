#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "common/query_tile_lists.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/calls.h"
#include "support/buffer.h"
#include "support/data.h"

namespace flash_dmattn::testing {

// Executions without a workspace.
Execution sequential_execution(
    int workers);  // runs workers one after the other on the calling thread
Execution threaded_execution(int workers);  // starts a thread for each worker, in descending order
Execution pooled_execution();  // uses one pool of the library per process, with two threads

// Memory of a call's workspace, and the execution that has it.
class Workspace {
 public:
  Workspace(std::size_t bytes, const Execution& execution);
  operator const Execution&() const { return execution_; }

 private:
  GuardedBuffer memory_;
  Execution execution_;
};

// Runs a call with a workspace of exactly its size, which has this byte everywhere.
template <class Call>
void run_in_new_workspace(const Call& call, std::byte fill = std::byte{0xFF}) {
  GuardedBuffer workspace(call.workspace_size(), "workspace");
  std::fill_n(workspace.data(), workspace.size(), fill);
  call.run(workspace);
}

// The workspace of an execution.
inline std::span<std::byte> workspace_of(const Execution& execution) {
  return {static_cast<std::byte*>(execution.workspace), execution.workspace_bytes};
}

// Tile lists that own their memory, in guarded buffers.
struct OwnedTileLists {
  QueryTileLists lists;
  GuardedBuffer begin, count, full, keys;
};
OwnedTileLists make_tile_lists(const TileListArgs& args, const Execution& execution);

struct Wanted {
  bool dq = true;
  bool dk = true;
  bool dv = true;
  bool dbias = true;
};

struct RunOptions {
  std::string_view backend = "cpu";
  Execution execution = sequential_execution(1);
  bool lse_low = true;
  Wanted wanted{};
  std::byte workspace_fill{0xFF};
};

// The outputs of a problem, poisoned until they are written.
struct Results {
  Tensor out, lse, lse_low, dq, dk, dv, dbias;
  explicit Results(const Data& data);
};

// A view of lse or lse_low with the type that the problem's dtype requires.
RowValues row_values(Tensor& tensor);

// The arguments of the calls, with results as their outputs.
ForwardArgs forward_args(const Data& data, Results& results);
BackwardArgs backward_args(const Data& data, Results& results, const Wanted& wanted = {});

// Both functions use a workspace of exactly workspace_size bytes, and fail the running test if anything outside
// of the outputs' elements and the workspace was written.
void run_forward(const Data& data, const RunOptions& options, Results& results);
void run_backward(const Data& data, const RunOptions& options, Results& results);
Results run(const Data& data, const RunOptions& options);  // runs both

}  // namespace flash_dmattn::testing
