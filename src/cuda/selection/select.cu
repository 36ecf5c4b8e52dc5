#include <algorithm>
#include <cstdint>
#include <string>

#include "common/arguments.h"
#include "common/selection_rule.h"
#include "cuda/device_plan.h"
#include "cuda/selection/best_keys.h"
#include "cuda/selection/global/global.cuh"
#include "cuda/selection/per_query/per_query.h"
#include "cuda/selection/selection.h"
#include "cuda/selection/widen.h"

namespace flash_dmattn::cuda {
namespace {

// Rows are sorted in batches of this many keys, which limits the workspace to 16 bytes for each key of a batch. 8 rows
// of 524288 keys are one batch.
constexpr std::int64_t batch_keys = std::int64_t{1} << 22;
constexpr std::int64_t batch_rows = 1024;

// The number of keys before the queries of a chunk.
std::int64_t past_keys(const SelectionArgs& args) { return args.seqlen_k - args.seqlen_q; }

// The number of blocks of the cluster that selects a row of a chunk; 0 if the queries are no chunk, or clusters cannot
// select it.
int blocks_of_chunk(const SelectionArgs& args) {
  const bool is_chunk =
      args.seqlen_q <= std::min<std::int64_t>(global::most_chunk, args.rule.window - 1);
  if (!is_chunk || past_keys(args) <= args.rule.window) return 0;
  return global::cluster_blocks(static_cast<int>(args.batch * args.heads),
                                static_cast<int>(past_keys(args)));
}

global::ClusterRows chunk_rows(const SelectionArgs& args, int blocks) {
  WorkspaceAllocator none(nullptr);
  global::ClusterRows chunk{
      .rows = global::lay_out(args, static_cast<int>(args.batch * args.heads), none),
      .blocks = blocks,
      .chunk = static_cast<int>(args.seqlen_q)};
  chunk.rows.seqlen_k = static_cast<int>(past_keys(args));
  return chunk;
}

int rows_per_batch(const SelectionArgs& args) {
  const std::int64_t fitting = batch_keys / std::max<std::int64_t>(args.seqlen_k, 1);
  return static_cast<int>(
      std::clamp<std::int64_t>(std::min(fitting, args.batch * args.heads), 1, batch_rows));
}

// Describes every batch of rows in `rows` and calls enqueue().
template <class Rows, class Enqueue>
void for_each_batch(Rows& rows, std::int64_t all_rows, const Enqueue& enqueue) {
  const std::int64_t step = rows.rows;
  for (std::int64_t row = 0; row < all_rows; row += step) {
    rows.first_row = static_cast<int>(row);
    rows.rows = static_cast<int>(std::min(step, all_rows - row));
    enqueue();
  }
}

void plan_select(const SelectionArgs& args, const Execution& execution, Plan<SelectionArgs>& plan) {
  require_sortable(args);
  require_aligned("intervals", args.intervals, sizeof(KeyInterval));
  widens(args.rule) ? make_plan<OnDevice<WidenedSelection>>(args, execution, plan)
                    : make_plan<OnDevice<BestKeys>>(args, execution, plan);
}

}  // namespace

void require_sortable(const SelectionArgs& args) {
  require_length("batch * heads", args.batch * args.heads);
  if (args.seqlen_k > per_query::max_keys) {
    throw InvalidArgument("seqlen_k", std::to_string(args.seqlen_k),
                          "at most " + std::to_string(per_query::max_keys) + " on a GPU");
  }
  if (args.scores_dtype > DType::f16) {
    throw InvalidArgument("scores_dtype", name_of(args.scores_dtype), "f32, bf16 or f16 on a GPU");
  }
}

bool BestKeys::takes_windows(const SelectionArgs& args) {
  return args.rule.selection == Selection::per_query && args.causal &&
         args.seqlen_q > global::most_chunk && args.heads <= per_query::RowWindows::most_heads;
}

BestKeys::BestKeys(const SelectionArgs& args, const Execution&) {
  if (args.batch * args.heads * args.seqlen_k == 0) return;
  if (args.rule.head_windows == nullptr && args.rule.window == 0) return;
  const bool per_query = args.rule.selection == Selection::per_query && args.causal &&
                         args.seqlen_q > 1 && args.rule.window < args.seqlen_k;
  WorkspaceAllocator workspace(nullptr);
  if (args.rule.head_windows != nullptr) {
    method_ = Method::per_query;
    per_query::lay_out(args, rows_per_batch(args), workspace);
  } else if (!per_query) {
    method_ = Method::global;
    global::lay_out(args, rows_per_batch(args), workspace);
  } else if (chunk_blocks_ = blocks_of_chunk(args); chunk_blocks_ > 0) {
    method_ = Method::chunk;
  } else {
    method_ = Method::per_query;
    per_query::lay_out(args, rows_per_batch(args), workspace);
  }
  bytes = workspace.used();
}

void BestKeys::run(const SelectionArgs& args, const Execution& execution) const {
  const std::int64_t all_rows = args.batch * args.heads;
  if (all_rows * args.seqlen_k == 0) return;
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  WorkspaceAllocator workspace(execution.workspace);
  switch (method_) {
    case Method::none: {
      const auto count = static_cast<std::size_t>(all_rows * args.seqlen_k);
      check(cudaMemsetAsync(args.intervals, 0, count * sizeof(KeyInterval), stream),
            "clearing intervals");
      return;
    }
    case Method::global: {
      global::RadixRows rows = global::lay_out(args, rows_per_batch(args), workspace);
      return for_each_batch(rows, all_rows, [&] { global::select_best(rows, stream); });
    }
    case Method::chunk: return global::select_in_clusters(chunk_rows(args, chunk_blocks_), stream);
    case Method::per_query: {
      per_query::Work work = per_query::lay_out(args, rows_per_batch(args), workspace);
      return for_each_batch(work.rows, all_rows, [&] {
        per_query::compute_intervals(per_query::sort_keys(work, stream), work.windows, stream);
      });
    }
  }
}

const SelectionBackend selection_backend = {
    .plan_select = plan_select,
    .tile_lists_workspace_size = [](const TileListArgs& args,
                                    const Execution&) { return tile_lists_workspace_size(args); },
    .tile_list_entries = [](const TileListArgs& args,
                            const Execution&) { return args.lists() * tile_list_capacity(args); },
    .build_tile_lists = build_tile_lists,
    .measure_workspace_size = [](const TileListArgs& args,
                                 const Execution&) { return measure_workspace_size(args); },
    .measure_key_bound = measure_key_bound,
};

}  // namespace flash_dmattn::cuda
