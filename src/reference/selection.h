#pragma once

#include <cstdint>
#include <vector>

#include "flash_dmattn/selection.h"

// Selection by its definition, one (batch, head) row at a time: for every query, count for every key
// how many of the keys the query could choose beat it. For tests; O(Sq Sk^2) time.
namespace flash_dmattn::reference {

// [Sq, Sk], 1 where query i sees key j. The interval output of `args` is not used.
std::vector<std::uint8_t> visible_elements(const SelectionArgs& args, std::int64_t batch,
                                           std::int64_t head);

// visible_elements as intervals [Sk]; {0, 0} for a key that no query sees. Throws std::logic_error if the
// queries that see a key are not consecutive.
std::vector<KeyInterval> select_key_intervals(const SelectionArgs& args, std::int64_t batch,
                                              std::int64_t head);

}  // namespace flash_dmattn::reference
