#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "api/checked_call.h"
#include "backend.h"
#include "common/arguments.h"
#include "common/selection_rule.h"
#include "flash_dmattn/error.h"

// Selection and tile lists, on the device of the data.
namespace flash_dmattn {
namespace {

const SelectionBackend& selection_of(Device device) { return *backend_of(device).selection; }

// Checks the sizes and the rule, and returns the arguments as backends see them.
SelectionArgs validated(const SelectionArgs& args) {
  require_length("batch", args.batch);
  require_length("heads", args.heads);
  require_length("seqlen_q", args.seqlen_q);
  require_length("seqlen_k", args.seqlen_k);
  require_rows(args.batch, args.heads, args.seqlen_k);
  require_selection(args);
  SelectionArgs result = args;
  const std::array sizes = {args.batch, args.heads, args.seqlen_k};
  result.scores_stride = resolved_strides(args.scores_stride, sizes);
  result.key_mask_stride = resolved_strides(args.key_mask_stride, sizes);
  return result;
}

// A measured bound holds for tiles of this many queries. The tiles of every GPU schedule are multiples of it.
constexpr std::int64_t measured_tile_rows = 64;

TileListArgs tile_list_args(const MeasureArgs& args) {
  return {
      .batch = args.batch,
      .heads = args.heads,
      .seqlen_q = args.seqlen_q,
      .seqlen_k = args.seqlen_k,
      .tile_rows = measured_tile_rows,
      .causal = args.causal,
      .intervals = with_resolved_strides(args.intervals, args.batch, args.heads, args.seqlen_k)};
}

}  // namespace

// ---- Selection -----------------------------------------------------------------------------------

SelectionArgs plan_call(const SelectionArgs& args, const Execution& execution,
                        std::string_view backend, Plan<SelectionArgs>& plan) {
  if (!backend.empty()) {
    throw InvalidArgument("backend", "\"" + std::string(backend) + "\"",
                          "\"\", as the device of the scores selects");
  }
  const SelectionArgs valid = validated(args);
  selection_of(args.device).plan_select(valid, execution, plan);
  const bool has_keys = args.batch * args.heads * args.seqlen_k > 0;
  require_pointer("scores", args.scores, has_keys);
  require_pointer("intervals", args.intervals, has_keys);
  return valid;
}

template class CheckedCall<SelectionArgs>;

void select_key_intervals(const SelectionArgs& args, const Execution& execution) {
  SelectCall(args, execution).run(workspace_of(execution));
}

// ---- Query tile lists ----------------------------------------------------------------------------

std::size_t tile_lists_workspace_size(Device device, const TileListArgs& args,
                                      const Execution& execution) {
  return selection_of(device).tile_lists_workspace_size(args, execution);
}

std::int64_t tile_list_entries(Device device, const TileListArgs& args,
                               const Execution& execution) {
  return selection_of(device).tile_list_entries(args, execution);
}

QueryTileLists build_tile_lists(Device device, const TileListArgs& args,
                                const TileListBuffers& buffers, const Execution& execution) {
  return selection_of(device).build_tile_lists(args, buffers, execution);
}

std::size_t measure_workspace_size(Device device, const TileListArgs& args,
                                   const Execution& execution) {
  return selection_of(device).measure_workspace_size(args, execution);
}

KeyBound measure_key_bound(Device device, const TileListArgs& args, const Execution& execution) {
  return selection_of(device).measure_key_bound(args, execution);
}

std::size_t measure_workspace_size(const MeasureArgs& args, const Execution& execution) {
  return measure_workspace_size(args.device, tile_list_args(args), execution);
}

KeyBound measure_key_bound(const MeasureArgs& args, const Execution& execution) {
  return measure_key_bound(args.device, tile_list_args(args), execution);
}

}  // namespace flash_dmattn
