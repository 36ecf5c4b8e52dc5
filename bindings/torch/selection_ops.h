#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "device.h"

// The operators of selection; registered in ops.cpp.
namespace flash_dmattn::binding {

// The result of key_bound.
KeyBound given_bound(const std::vector<std::int64_t>& given);
// The result of measure_key_bound.
KeyBound measured_bound(const MeasureArgs& args, Execution execution, const Tensor& like);

// Intervals [B, H, Sk, 2] of the selection that `args` describe. Its device and result are set here.
Tensor select_intervals(SelectionArgs args, const CallDevice& device, const Tensor& scores);
// The arguments of a selection among all keys of `scores` [B, H, Sk].
SelectionArgs selection_args(const Tensor& scores, std::int64_t window, bool is_causal,
                             std::int64_t query_length);

// windows: none, one for all heads, or one for each.
Tensor select_op(const Tensor& scores, const OptionalTensor& key_mask,
                 std::vector<std::int64_t> windows, std::string selection, bool is_causal,
                 std::int64_t query_length, std::int64_t recent_window, bool recent_competes,
                 std::int64_t sink_tokens, std::optional<double> score_threshold);
std::vector<std::int64_t> measure_op(const Tensor& key_intervals, std::int64_t query_length);
std::tuple<Tensor, Tensor, Tensor, Tensor> tile_lists_op(const Tensor& key_intervals,
                                                         std::int64_t tile_rows,
                                                         std::int64_t query_length,
                                                         std::vector<std::int64_t> key_bound);

}  // namespace flash_dmattn::binding
