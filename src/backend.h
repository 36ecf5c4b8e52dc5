#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "flash_dmattn/attention.h"

// The one interface between the API and what computes. Arguments have been validated when a backend
// sees them, and the stride of every dimension of size 1 of mask, bias, dbias, intervals and plan is 0;
// a backend only says what it cannot do, in words.
namespace flash_dmattn {

struct Backend {
  std::string_view name;
  BackendInfo (*info)();
  std::string (*supports)(const Problem&);  // "" = yes, else why not
  std::int64_t (*query_tile_rows)(const Problem&);
  std::size_t (*forward_workspace_size)(const ForwardArgs&, const Execution&);
  std::size_t (*backward_workspace_size)(const BackwardArgs&, const Execution&);
  void (*forward)(const ForwardArgs&, const Execution&);
  void (*backward)(const BackwardArgs&, const Execution&);
  bool needs_plan;  // where there are intervals, of query_tile_rows() queries per tile
};

extern const Backend cpu_backend;        // src/cpu/backend.cpp
extern const Backend reference_backend;  // src/reference/attention.cpp

// In order of preference, the reference last.
std::span<const Backend* const> backend_table();

}  // namespace flash_dmattn
