#pragma once

#include <cstddef>

#include "flash_dmattn/execution.h"
#include "flash_dmattn/selection.h"

// Selections whose rule shows keys that were not chosen (recent keys and sinks), or has a window for each head. The keys
// that compete are a selection of their own (select.cu); a last pass over its intervals adds the others.
namespace flash_dmattn::cuda {

// Whether a rule is more than one selection.
inline bool widens(const KeySelection& keep) {
  return keep.recent_window > 0 || keep.sink_tokens > 0 || keep.head_windows != nullptr;
}

// The same as select_workspace_size and select_key_intervals, of validated arguments.
std::size_t widened_workspace_size(const SelectionArgs& args);
void select_widened(const SelectionArgs& args, const Execution& execution);

}  // namespace flash_dmattn::cuda
