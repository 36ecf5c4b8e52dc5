#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "flash_dmattn/error.h"
#include "flash_dmattn/execution.h"
#include "flash_dmattn/visibility.h"

// The checks of arguments that several functions share.
namespace flash_dmattn {

// Elements of an array, and the span of one in elements. Leaves room for any buffer that holds a few
// doubles per element to have a size in bytes.
inline constexpr std::int64_t max_elements = std::int64_t{1} << 56;

inline bool product_fits(std::initializer_list<std::int64_t> factors) {
  if (std::find(factors.begin(), factors.end(), 0) != factors.end()) return true;
  std::int64_t product = 1;
  for (const std::int64_t factor : factors) {
    if (product > max_elements / factor) return false;
    product *= factor;
  }
  return true;
}

inline void require_length(std::string_view argument, std::int64_t value) {
  if (value < 0 || value > std::numeric_limits<std::int32_t>::max()) {
    throw InvalidArgument(argument, std::to_string(value), "a length in [0, 2^31)");
  }
}

inline void require_range(std::string_view argument, std::int64_t value, std::int64_t least,
                          std::int64_t most) {
  if (value >= least && value <= most) return;
  const std::string range = least == most ? "" : std::to_string(least) + " to ";
  throw InvalidArgument(argument, std::to_string(value), range + std::to_string(most));
}

// Rows [batch, heads] of `length` elements each.
inline void require_rows(std::int64_t batch, std::int64_t heads, std::int64_t length) {
  if (product_fits({batch, heads, length})) return;
  throw InvalidArgument("batch",
                        std::to_string(batch) + " with " + std::to_string(heads) + " heads of " +
                            std::to_string(length) + " elements",
                        "at most 2^56 elements");
}

inline void require_pointer(std::string_view argument, const void* pointer, bool needed) {
  if (needed && pointer == nullptr) throw InvalidArgument(argument, "null", "a pointer");
}

inline void require_aligned(std::string_view argument, const void* pointer, std::size_t alignment) {
  const std::size_t excess = reinterpret_cast<std::uintptr_t>(pointer) % alignment;
  if (excess == 0) return;
  throw InvalidArgument(argument, "an address " + std::to_string(excess) + " bytes off alignment",
                        "an address aligned to " + std::to_string(alignment) + " bytes");
}

inline void require_workers(const Execution& execution) {
  if (execution.workers < 1) {
    throw InvalidArgument("execution.workers", std::to_string(execution.workers), "at least 1");
  }
}

inline void require_workspace(const Execution& execution, std::size_t bytes) {
  if (execution.workspace_bytes < bytes) {
    throw InvalidArgument("execution.workspace_bytes", std::to_string(execution.workspace_bytes),
                          "at least " + std::to_string(bytes));
  }
  if (bytes == 0) return;
  require_pointer("execution.workspace", execution.workspace, true);
  require_aligned("execution.workspace", execution.workspace, workspace_alignment);
}

// The execution of a part of a call, in memory of its own.
inline Execution with_workspace(const Execution& execution, std::span<std::byte> workspace,
                                std::size_t needed) {
  Execution result = execution;
  result.workspace = workspace.data();
  result.workspace_bytes = workspace.size();
  require_workspace(result, needed);
  return result;
}

// Strides of a [sizes] array, with dense_stride replaced by the stride of a dense array.
template <std::size_t Rank>
std::array<std::int64_t, Rank> resolved_strides(std::array<std::int64_t, Rank> stride,
                                                const std::array<std::int64_t, Rank>& sizes) {
  std::uint64_t dense = 1;  // sizes have yet to be checked, and may overflow it
  for (std::size_t i = Rank; i-- > 0; dense *= static_cast<std::uint64_t>(sizes[i])) {
    if (stride[i] == dense_stride) stride[i] = static_cast<std::int64_t>(dense);
  }
  return stride;
}

// Intervals [batch, heads, Sk] with the strides that a kernel multiplies by: 0 for a dimension of size 1.
inline KeyIntervals with_resolved_strides(const KeyIntervals& intervals, std::int64_t batch,
                                          std::int64_t heads, std::int64_t seqlen_k) {
  if (intervals.data == nullptr) return {nullptr, 0, 0};
  const auto stride = resolved_strides<3>({intervals.stride_batch, intervals.stride_head, 1},
                                          {batch, heads, seqlen_k});
  return {intervals.data, batch == 1 ? 0 : stride[0], heads == 1 ? 0 : stride[1]};
}

constexpr std::size_t align_up(std::size_t bytes) {
  return (bytes + workspace_alignment - 1) / workspace_alignment * workspace_alignment;
}

}  // namespace flash_dmattn
