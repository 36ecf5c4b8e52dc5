#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flash_dmattn/attention.h"
#include "kv_backend.h"
#include "selection/schedule_contents.h"

// The one interface between the API and the backends. Arguments have been validated when a backend
// sees them, and the stride of every dimension of size 1 of mask, bias, dbias and intervals is 0;
// a backend only declines problems, in words.
namespace flash_dmattn {

struct Backend {
  std::string_view name;
  Device device;  // where it computes
  BackendInfo (*info)();
  std::string (*supports)(const Problem&);  // "" = yes, else why not
  // Of the problem's intervals or key list; see schedule.h. The API fills in what a schedule was built for.
  std::size_t (*schedule_size)(const Problem&, const Visibility&, Direction, const Execution&);
  std::size_t (*schedule_workspace_size)(const Problem&, const Visibility&, Direction,
                                         const Execution&);
  ScheduleContents (*build_schedule)(const Problem&, const Visibility&, Direction,
                                     std::span<std::byte> memory, const Execution&);
  std::size_t (*forward_workspace_size)(const ForwardArgs&, const Execution&);
  std::size_t (*backward_workspace_size)(const BackwardArgs&, const Execution&);
  void (*forward)(const ForwardArgs&, const Execution&);
  void (*backward)(const BackwardArgs&, const Execution&);
  // Names of the main kernel that a call would run, and of all that can run on this machine.
  std::string (*forward_kernel)(const ForwardArgs&);
  std::string (*backward_kernel)(const BackwardArgs&);
  std::vector<std::string> (*kernels)();
  bool needs_schedule;  // where there are intervals
  const KvBackend* kv;  // null: it keeps no KV caches
};

// "" when the problem's memory is where a backend computes, else why it declines.
inline std::string decline_other_device(const Problem& problem, std::string_view backend,
                                        Device device) {
  if (problem.device == device) return "";
  return std::string(backend) + " computes in " + std::string(name_of(device)) +
         " memory, and the problem's is " + std::string(name_of(problem.device));
}

// src/cuda/backend.cu, or absent.cpp in a build without CUDA. Every pointer of its arguments, the schedule's
// included, is to memory of the current device, of which Execution::stream is a cudaStream_t. Calls only
// enqueue work: no synchronisation, no allocation, capturable in a graph. Without a schedule of key intervals
// it visits all from the first to the last key that a tile's queries see.
extern const Backend cuda_backend;
extern const Backend cpu_backend;        // src/cpu/backend.cpp
extern const Backend reference_backend;  // src/reference/attention.cpp

// In order of preference, the reference last.
std::span<const Backend* const> backend_table();

// Throws InvalidArgument for a name that no backend has.
const Backend& backend_named(std::string_view name);

}  // namespace flash_dmattn
