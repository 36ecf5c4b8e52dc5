#pragma once

#include <cstdint>

#include "cpu/task.h"
#include "flash_dmattn/attention.h"

// Makes tasks from arguments, with shapes and strides resolved once.
namespace flash_dmattn::cpu {

// Rows of a tile and their scratch memory are counted in int, in units of the group.
inline constexpr std::int64_t largest_group = 1 << 16;

Rows rows_of(const ConstTensor4& tensor);
Term term_of(const ConstTensor4& tensor, DType dtype, const Problem& problem,
             const BroadcastShape& shape);
// Without tile lists, which are in the workspace.
Task task_of(const Problem& problem, const Inputs& in);

// Whether tiles share packed keys: without intervals every tile of a head visits the same blocks of keys. A
// single tile has nothing to share, and needs less scratch per worker unshared.
bool shares_keys(const Task& task);

// The number of key blocks over all heads.
std::int64_t all_key_blocks(const Task& task);

bool is_empty(const Problem& problem);

}  // namespace flash_dmattn::cpu
