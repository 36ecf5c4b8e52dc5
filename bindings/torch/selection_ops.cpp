#include "selection_ops.h"

#include <algorithm>

#include "device.h"

namespace flash_dmattn::binding {
namespace {

Selection selection_of(const std::string& name) {
  if (name == "per_query") return Selection::per_query;
  if (name == "global") return Selection::global;
  throw InvalidArgument("selection", "\"" + name + "\"", "\"per_query\" or \"global\"");
}

void take_key_mask(SelectionArgs& args, const OptionalTensor& key_mask, const Tensor& scores) {
  if (!key_mask) return;
  expect_on_device_of(*key_mask, "key_mask", scores, "scores");
  if (key_mask->dim() != 3 || key_mask->scalar_type() != ScalarType::Bool) {
    throw InvalidArgument("key_mask", shape_text(*key_mask), "bool of shape [B or 1, H or 1, Sk]");
  }
  args.key_mask = static_cast<const std::uint8_t*>(key_mask->const_data_ptr());
  for (std::size_t d = 0; d < 3; ++d) {
    const auto dim = static_cast<std::int64_t>(d);
    const bool one = d < 2 && key_mask->size(dim) == 1;
    if (!one && key_mask->size(dim) != scores.size(dim)) {
      throw InvalidArgument("key_mask", shape_text(*key_mask),
                            "bool that broadcasts to " + shape_text(scores));
    }
    args.key_mask_stride[d] = one ? 0 : key_mask->stride(dim);
  }
}

}  // namespace

KeyBound given_bound(const std::vector<std::int64_t>& given) {
  if (given.empty()) return {};
  if (given.size() != 2 && given.size() != 3) {
    throw InvalidArgument("key_bound", std::to_string(given.size()) + " numbers",
                          "base (-1: unknown), per_query and perhaps consecutive, or none");
  }
  return {given[0], given[1], given.size() == 3 && given[2] != 0};
}

KeyBound measured_bound(const MeasureArgs& args, Execution execution, const Tensor& like) {
  const OptionalTensor workspace =
      give_workspace(execution, measure_workspace_size(args, execution), like);
  return measure_key_bound(args, execution);
}

SelectionArgs selection_args(const Tensor& scores, std::int64_t window, bool is_causal,
                             std::int64_t query_length) {
  if (scores.dim() != 3) throw InvalidArgument("scores", shape_text(scores), "shape [B, H, Sk]");
  SelectionArgs args;
  args.batch = scores.size(0);
  args.heads = scores.size(1);
  args.seqlen_q = query_length;
  args.seqlen_k = scores.size(2);
  args.rule.window = window;
  args.causal = is_causal;
  args.scores = scores.const_data_ptr();
  args.scores_dtype = dtype_of(scores, "scores");
  for (std::size_t d = 0; d < 3; ++d) {
    args.scores_stride[d] = scores.stride(static_cast<std::int64_t>(d));
  }
  return args;
}

Tensor select_intervals(SelectionArgs args, const CallDevice& device, const Tensor& scores) {
  args.device = device.device();
  const Tensor intervals =
      allocate({args.batch, args.heads, args.seqlen_k, 2}, ScalarType::Int, scores);
  args.intervals = static_cast<KeyInterval*>(intervals.mutable_data_ptr());
  run(SelectCall(args, device.execution(scores.numel())), scores);
  return intervals;
}

Tensor select_op(const Tensor& scores, const OptionalTensor& key_mask,
                 std::vector<std::int64_t> windows, std::string selection, bool is_causal,
                 std::int64_t query_length, std::int64_t recent_window, bool recent_competes,
                 std::int64_t sink_tokens, std::optional<double> score_threshold) {
  const CallDevice device(scores);
  const std::int64_t window = windows.empty() ? every_key : windows[0];
  SelectionArgs args = selection_args(scores, window, is_causal, query_length);
  args.rule.selection = selection_of(selection);
  take_key_mask(args, key_mask, scores);
  args.rule.recent_window = recent_window;
  args.rule.recent_competes = recent_competes;
  args.rule.sink_tokens = sink_tokens;
  if (score_threshold) args.rule.score_threshold = *score_threshold;
  if (windows.size() > 1) {
    if (static_cast<std::int64_t>(windows.size()) != args.heads) {
      throw InvalidArgument(
          "windows", std::to_string(windows.size()) + " numbers",
          "none, one, or one for each of " + std::to_string(args.heads) + " heads");
    }
    args.rule.head_windows = windows.data();
  }
  return select_intervals(args, device, scores);
}

namespace {

// `dense`, of intervals [B, H, Sk, 2], must outlive the result.
MeasureArgs measure_args(const CallDevice& device, const Tensor& dense, std::int64_t query_length) {
  MeasureArgs args;
  args.device = device.device();
  args.batch = dense.size(0);
  args.heads = dense.size(1);
  args.seqlen_k = dense.size(2);
  args.seqlen_q = query_length;
  args.intervals.data = static_cast<const KeyInterval*>(dense.const_data_ptr());
  return args;
}

void expect_intervals(const Tensor& key_intervals) {
  if (key_intervals.dim() != 4 || key_intervals.size(3) != 2 ||
      key_intervals.scalar_type() != ScalarType::Int) {
    throw InvalidArgument("key_intervals", shape_text(key_intervals),
                          "int32 of shape [B, H, Sk, 2]");
  }
}

}  // namespace

// {base, per_query} of intervals [B, H, Sk, 2].
std::vector<std::int64_t> measure_op(const Tensor& key_intervals, std::int64_t query_length) {
  expect_intervals(key_intervals);
  const CallDevice device(key_intervals);
  const Tensor dense = as_contiguous(key_intervals);
  const KeyBound bound = measured_bound(measure_args(device, dense, query_length),
                                        device.execution(dense.numel()), dense);
  return {bound.base, bound.per_query};
}

// Keys [entries], and begin, count and full [B, H, tiles] of QueryTileLists, for the kernels in
// Python.
std::tuple<Tensor, Tensor, Tensor, Tensor> tile_lists_op(const Tensor& key_intervals,
                                                         std::int64_t tile_rows,
                                                         std::int64_t query_length,
                                                         std::vector<std::int64_t> key_bound) {
  expect_intervals(key_intervals);
  const CallDevice device(key_intervals);
  const Tensor dense = as_contiguous(key_intervals);
  const MeasureArgs source = measure_args(device, dense, query_length);
  TileListArgs args{.batch = source.batch,
                    .heads = source.heads,
                    .seqlen_q = query_length,
                    .seqlen_k = source.seqlen_k,
                    .tile_rows = tile_rows,
                    .intervals = {.data = source.intervals.data,
                                  .stride_batch = source.heads * source.seqlen_k,
                                  .stride_head = source.seqlen_k},
                    .bound = given_bound(key_bound)};
  Execution execution = device.execution(dense.numel());
  if (source.device == Device::cuda && !args.bound.known()) {
    const OptionalTensor workspace =
        give_workspace(execution, measure_workspace_size(source.device, args, execution), dense);
    args.bound = measure_key_bound(source.device, args, execution);
  }
  const OptionalTensor workspace =
      give_workspace(execution, tile_lists_workspace_size(source.device, args, execution), dense);
  const auto lists = [&](ScalarType type) {
    return allocate({args.batch, args.heads, args.tiles()}, type, dense);
  };
  const Tensor begin = lists(ScalarType::Long);
  const Tensor count = lists(ScalarType::Int);
  const Tensor full = lists(ScalarType::Int);
  const Tensor keys =
      allocate({tile_list_entries(source.device, args, execution)}, ScalarType::Int, dense);
  build_tile_lists(source.device, args,
                   {.begin = static_cast<std::int64_t*>(begin.mutable_data_ptr()),
                    .count = static_cast<std::int32_t*>(count.mutable_data_ptr()),
                    .full = static_cast<std::int32_t*>(full.mutable_data_ptr()),
                    .keys = static_cast<std::int32_t*>(keys.mutable_data_ptr())},
                   execution);
  return {keys, begin, count, full};
}

}  // namespace flash_dmattn::binding
