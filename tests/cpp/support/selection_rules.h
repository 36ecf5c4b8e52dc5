#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flash_dmattn/selection.h"
#include "support/random.h"

// Random rules of selections.
namespace flash_dmattn::testing {

// A rule for rows of this shape: half of the time a window of each query alone, else every part as often at one of its
// ends as between them. `head_windows` is the memory of the windows of heads, where it has some.
SelectionRule random_rule(const SelectionArgs& shape, std::vector<std::int64_t>& head_windows,
                          Random& random);

// The shape and the rule.
std::string text_of(const SelectionArgs& args);

}  // namespace flash_dmattn::testing
