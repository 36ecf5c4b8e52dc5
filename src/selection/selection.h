#pragma once

#include "flash_dmattn/selection.h"

// Selection and plan in host memory: the functions of the same names in flash_dmattn/selection.h, where
// the arguments' device is the CPU.
namespace flash_dmattn::cpu {

std::size_t select_workspace_size(const SelectionArgs& args, const Execution& execution);
void select_key_intervals(const SelectionArgs& args, const Execution& execution);

std::size_t plan_workspace_size(const PlanArgs& args, const Execution& execution);
std::int64_t plan_entries(const PlanArgs& args, const Execution& execution);
Plan build_plan(const PlanArgs& args, const PlanBuffers& buffers, const Execution& execution);

std::size_t measure_workspace_size(const PlanArgs& args, const Execution& execution);
KeyBound measure_key_bound(const PlanArgs& args, const Execution& execution);

}  // namespace flash_dmattn::cpu
