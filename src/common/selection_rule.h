#pragma once

#include <cstdint>

#include "flash_dmattn/selection.h"

// The parts of a selection rule that all devices share.
namespace flash_dmattn {

// Throws InvalidArgument for an invalid rule. The sizes of the arguments have been checked.
void require_selection(const SelectionArgs& args);

// The number of keys that a head keeps, at most Sk.
std::int64_t window_of(const SelectionArgs& args, std::int64_t head);

// The largest of them.
std::int64_t widest_window(const SelectionArgs& args);

// The number of positions for which a key does not compete.
inline std::int64_t delay_of(const SelectionRule& rule) {
  return rule.recent_competes ? 0 : rule.recent_window;
}

// The lowest float at or above a threshold: the scores that reach one reach the other.
float least_score(double threshold);

}  // namespace flash_dmattn
