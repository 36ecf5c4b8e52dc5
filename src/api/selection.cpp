#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "arguments.h"
#include "cpu/selection/selection.h"
#include "cuda/selection/selection.h"
#include "flash_dmattn/error.h"

// Selection on the device of the data.
namespace flash_dmattn {
namespace {

bool on_gpu(Device device) {
  if (device != Device::cpu && device != Device::cuda) {
    throw InvalidArgument("device", std::to_string(static_cast<int>(device)), "cpu or cuda");
  }
  return device == Device::cuda;
}

void require_gpu(Device device, const char* what) {
  if (!on_gpu(device)) {
    throw InvalidArgument("device", name_of(device), std::string("cuda, for ") + what);
  }
}

SelectionArgs with_resolved_strides(const SelectionArgs& args) {
  SelectionArgs result = args;
  const std::array sizes = {args.batch, args.heads, args.seqlen_k};
  result.scores_stride = resolved_strides(args.scores_stride, sizes);
  result.key_mask_stride = resolved_strides(args.key_mask_stride, sizes);
  return result;
}

RankArgs with_resolved_strides(const RankArgs& args) {
  RankArgs result = args;
  const auto dense = [&](const std::array<std::int64_t, 2>& shape) {
    return std::array{shape[0], shape[1], args.seqlen_q, args.seqlen_k};
  };
  result.scores_stride = resolved_strides(
      args.scores_stride, {args.scores_shape[0], args.scores_shape[1], args.seqlen_k});
  result.mask_stride = resolved_strides(args.mask_stride, dense(args.mask_shape));
  result.bias_stride = resolved_strides(args.bias_stride, dense(args.bias_shape));
  return result;
}

constexpr std::int64_t unlimited_keys = std::numeric_limits<std::int64_t>::max();

// A measured bound holds for consecutive tiles of this many queries; every schedule's tiles on a GPU consist of them.
std::int64_t measured_tile_rows(std::int64_t seqlen_q) {
  std::int64_t rows = 64;
  while (max_query_tiles * rows < seqlen_q) rows *= 2;
  return rows;
}

TileListArgs tile_list_args(const MeasureArgs& args) {
  return {
      .batch = args.batch,
      .heads = args.heads,
      .seqlen_q = args.seqlen_q,
      .seqlen_k = args.seqlen_k,
      .tile_rows = measured_tile_rows(args.seqlen_q),
      .causal = args.causal,
      .intervals = with_resolved_strides(args.intervals, args.batch, args.heads, args.seqlen_k)};
}

}  // namespace

std::size_t select_workspace_size(const SelectionArgs& args, const Execution& execution) {
  return on_gpu(args.device) ? cuda::select_workspace_size(args)
                             : cpu::select_workspace_size(args, execution);
}

void select_key_intervals(const SelectionArgs& args, const Execution& execution) {
  const SelectionArgs resolved = with_resolved_strides(args);
  on_gpu(args.device) ? cuda::select_key_intervals(resolved, execution)
                      : cpu::select_key_intervals(resolved, execution);
}

std::int64_t key_list_stride(const SelectionArgs& args) {
  require_gpu(args.device, "key lists");
  return cuda::key_list_stride(args);
}

std::size_t select_list_workspace_size(const SelectionArgs& args) {
  require_gpu(args.device, "key lists");
  return cuda::select_list_workspace_size(args);
}

KeyList select_key_list(const SelectionArgs& args, std::int32_t* keys, std::int32_t* count,
                        const Execution& execution) {
  require_gpu(args.device, "key lists");
  return cuda::select_key_list(with_resolved_strides(args), keys, count, execution);
}

std::size_t rank_workspace_size(const RankArgs& args) {
  require_gpu(args.device, "ranks of keys");
  return cuda::rank_workspace_size(args);
}

void rank_keys(const RankArgs& args, const Execution& execution) {
  require_gpu(args.device, "ranks of keys");
  cuda::rank_keys(with_resolved_strides(args), execution);
}

// ---- Query tiles' key lists ----------------------------------------------------------------------

std::size_t tile_lists_workspace_size(Device device, const TileListArgs& args,
                                      const Execution& execution) {
  return on_gpu(device) ? cuda::tile_lists_workspace_size(args)
                        : cpu::tile_lists_workspace_size(args, execution);
}

std::int64_t tile_list_entries(Device device, const TileListArgs& args,
                               const Execution& execution) {
  return on_gpu(device) ? args.lists() * cuda::tile_list_capacity(args)
                        : cpu::tile_list_entries(args, execution);
}

QueryTileLists build_tile_lists(Device device, const TileListArgs& args,
                                const TileListBuffers& buffers, const Execution& execution) {
  return on_gpu(device) ? cuda::build_tile_lists(args, buffers, execution)
                        : cpu::build_tile_lists(args, buffers, unlimited_keys, execution);
}

std::size_t measure_workspace_size(Device device, const TileListArgs& args,
                                   const Execution& execution) {
  return on_gpu(device) ? cuda::measure_workspace_size(args)
                        : cpu::measure_workspace_size(args, execution);
}

KeyBound measure_key_bound(Device device, const TileListArgs& args, const Execution& execution) {
  return on_gpu(device) ? cuda::measure_key_bound(args, execution)
                        : cpu::measure_key_bound(args, execution);
}

std::size_t measure_workspace_size(const MeasureArgs& args, const Execution& execution) {
  return measure_workspace_size(args.device, tile_list_args(args), execution);
}

KeyBound measure_key_bound(const MeasureArgs& args, const Execution& execution) {
  return measure_key_bound(args.device, tile_list_args(args), execution);
}

}  // namespace flash_dmattn
