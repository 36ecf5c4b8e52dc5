#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/query_tile_lists.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/kv_cache.h"
#include "flash_dmattn/plan.h"
#include "flash_dmattn/scores.h"
#include "flash_dmattn/selection.h"

// The one interface between the API and the backends: everything that a device does is a member of its Backend.
// Arguments have been validated when a backend sees them, the stride of every dimension of size 1 of mask, bias, dbias
// and intervals is 0, and no stride is dense_stride. A backend only declines problems, in words.
namespace flash_dmattn {

// Plans a call: decides its kernels and lays out its workspace.
template <class Args>
using PlanFunction = void (*)(const Args&, const Execution&, Plan<Args>&);

// The functions of selection.h, and the tile lists of common/query_tile_lists.h. Sizes follow from the arguments alone on a GPU.
struct SelectionBackend {
  PlanFunction<SelectionArgs> plan_select;

  std::size_t (*tile_lists_workspace_size)(const TileListArgs&, const Execution&);
  std::int64_t (*tile_list_entries)(const TileListArgs&, const Execution&);
  QueryTileLists (*build_tile_lists)(const TileListArgs&, const TileListBuffers&, const Execution&);
  std::size_t (*measure_workspace_size)(const TileListArgs&, const Execution&);
  KeyBound (*measure_key_bound)(const TileListArgs&, const Execution&);
};

// The functions of kv_cache.h.
struct KvBackend {
  // The plans of the decode steps of such a cache; null, with the reason, if the backend keeps none.
  PlanFunction<DecodeStepArgs> (*find_decode_step)(const KvCacheShape&, std::string& reason);
  void (*clear)(const KvCache&, const Execution&);
  void (*copy_rows)(const CopyRowsArgs&, const Execution&);
  void (*fill)(const FillArgs&, const Execution&);
  void (*append)(const AppendArgs&, const Execution&);
  PlanFunction<PendingIntervalsArgs> plan_pending_intervals;
  PlanFunction<CommitArgs> plan_commit;
};

struct Backend {
  std::string_view name;
  Device device;  // where it computes
  BackendInfo (*info)();
  // The plans of a problem's calls; null, with the reason, if the backend does not compute it.
  PlanFunction<ForwardArgs> (*find_forward)(const Problem&, std::string& reason);
  PlanFunction<BackwardArgs> (*find_backward)(const Problem&, std::string& reason);
  PlanFunction<ScoreProjectionArgs> (*find_score_projection)(const ScoreProjectionArgs&,
                                                             std::string& reason);
  // The names of all main kernels that can run on this machine.
  std::vector<std::string> (*kernels)();

  // The rest is null if the backend lacks it.
  const SelectionBackend* selection = nullptr;
  const KvBackend* kv = nullptr;
};

// "" when the problem's memory is where a backend computes, else why it declines.
inline std::string decline_other_device(const Problem& problem, std::string_view backend,
                                        Device device) {
  if (problem.device == device) return "";
  return std::string(backend) + " computes in " + std::string(name_of(device)) +
         " memory, and the problem's is " + std::string(name_of(problem.device));
}

// src/cuda/backend.cu, or absent.cpp in a build without CUDA. Every pointer of its arguments is to memory of the
// current device, of which Execution::stream is a cudaStream_t. Calls only enqueue work: no synchronisation, no
// allocation, capturable in a graph.
extern const Backend cuda_backend;
extern const Backend cpu_backend;        // src/cpu/backend.cpp
extern const Backend reference_backend;  // src/reference/attention.cpp

// Backends are in order of preference, the reference last.
std::span<const Backend* const> backend_table();

// Throws InvalidArgument for a name that no backend has.
const Backend& backend_named(std::string_view name);

// The first backend of a device, which has its selection. Throws InvalidArgument, with the reason, if the build has none.
const Backend& backend_of(Device device);

}  // namespace flash_dmattn
