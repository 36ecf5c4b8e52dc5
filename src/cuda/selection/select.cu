#include <algorithm>
#include <cstdint>
#include <string>

#include "arguments.h"
#include "cuda/selection/global/global.cuh"
#include "cuda/selection/per_query/per_query.h"
#include "cuda/selection/selection.h"
#include "cuda/selection/widen.h"
#include "plan.h"
#include "selection/key_selection.h"

namespace flash_dmattn::cuda {
namespace {

// Rows are sorted in batches of this many keys, which limits the workspace to 16 bytes for each key of a batch. 8 rows
// of 524288 keys are one batch.
constexpr std::int64_t batch_keys = std::int64_t{1} << 22;
constexpr std::int64_t batch_rows = 1024;

// The way in which a selection is computed. It is global, that is, the same for all queries, without causality, with a
// single query, or if the window has room for every key. A few queries after more keys than the window are a chunk.
enum class Method : std::uint8_t { none, global, chunk, per_query };

// The rows of a chunk, for clusters to select; they have no blocks if clusters cannot select them.
global::ClusterRows chunk_rows(const SelectionArgs& args) {
  const auto rows = static_cast<int>(args.batch * args.heads);
  const std::int64_t past = args.seqlen_k - args.seqlen_q;
  const bool is_chunk =
      args.seqlen_q <= std::min<std::int64_t>(global::most_chunk, args.keep.window - 1);
  if (!is_chunk || past <= args.keep.window) return {};
  WorkspaceAllocator none(nullptr);
  global::ClusterRows chunk{.rows = global::lay_out(args, rows, none),
                            .blocks = global::cluster_blocks(rows, static_cast<int>(past)),
                            .chunk = static_cast<int>(args.seqlen_q)};
  chunk.rows.seqlen_k = static_cast<int>(past);
  return chunk;
}

Method method_of(const SelectionArgs& args) {
  if (args.keep.window == 0) return Method::none;
  const bool per_query = args.keep.selection == Selection::per_query && args.causal &&
                         args.seqlen_q > 1 && args.keep.window < args.seqlen_k;
  if (!per_query) return Method::global;
  return chunk_rows(args).blocks > 0 ? Method::chunk : Method::per_query;
}

int rows_per_batch(const SelectionArgs& args) {
  const std::int64_t fitting = batch_keys / std::max<std::int64_t>(args.seqlen_k, 1);
  return static_cast<int>(
      std::clamp<std::int64_t>(std::min(fitting, args.batch * args.heads), 1, batch_rows));
}

}  // namespace

void validate(const SelectionArgs& args) {
  require_length("batch", args.batch);
  require_length("heads", args.heads);
  require_length("seqlen_q", args.seqlen_q);
  require_length("seqlen_k", args.seqlen_k);
  require_length("batch * heads", args.batch * args.heads);
  if (args.seqlen_k > per_query::max_keys) {
    throw InvalidArgument("seqlen_k", std::to_string(args.seqlen_k),
                          "at most " + std::to_string(per_query::max_keys) + " on a GPU");
  }
  require_key_selection(args);
  if (args.scores_dtype > DType::f16) {
    throw InvalidArgument("scores_dtype", name_of(args.scores_dtype), "f32, bf16 or f16 on a GPU");
  }
}

namespace {

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

}  // namespace

namespace {

// The choice of keys, with the method and the layout of the workspace that shapes and the GPU determine.
class SelectCall {
 public:
  std::size_t bytes = 0;

  SelectCall(const SelectionArgs& args, const Execution&) {
    validate(args);
    if (reinterpret_cast<std::uintptr_t>(args.intervals) % sizeof(KeyInterval) != 0) {
      throw InvalidArgument("intervals", "a misaligned address", "an address aligned to 8 bytes");
    }
    if (args.batch * args.heads * args.seqlen_k == 0) return;
    if (widens(args.keep)) {
      bytes = widened_workspace_size(args);
      return;
    }
    method_ = method_of(args);
    WorkspaceAllocator workspace(nullptr);
    if (method_ == Method::global) global::lay_out(args, rows_per_batch(args), workspace);
    if (method_ == Method::per_query) {
      per_query::lay_out(args, rows_per_batch(args), per_query::Result::intervals, workspace);
    }
    bytes = workspace.used();
  }

  void run(const SelectionArgs& args, const Execution& execution) const {
    const std::int64_t all_rows = args.batch * args.heads;
    if (all_rows * args.seqlen_k == 0) return;
    if (widens(args.keep)) return select_widened(args, execution);
    const auto stream = static_cast<cudaStream_t>(execution.stream);
    if (method_ == Method::none) {
      const auto count = static_cast<std::size_t>(all_rows * args.seqlen_k);
      check(cudaMemsetAsync(args.intervals, 0, count * sizeof(KeyInterval), stream),
            "clearing intervals");
      return;
    }
    if (method_ == Method::chunk) {
      global::select_in_clusters(chunk_rows(args), stream);
      return;
    }
    WorkspaceAllocator workspace(execution.workspace);
    if (method_ == Method::per_query) {
      per_query::Work work =
          per_query::lay_out(args, rows_per_batch(args), per_query::Result::intervals, workspace);
      for_each_batch(work.rows, all_rows, [&] {
        per_query::compute_intervals(per_query::sort_keys(work, stream), stream);
      });
      return;
    }
    global::RadixRows rows = global::lay_out(args, rows_per_batch(args), workspace);
    for_each_batch(rows, all_rows, [&] { global::select_best(rows, stream); });
  }

 private:
  Method method_ = Method::none;
};

}  // namespace

std::size_t select_workspace_size(const SelectionArgs& args) { return SelectCall(args, {}).bytes; }

void select_key_intervals(const SelectionArgs& args, const Execution& execution) {
  const SelectCall call(args, execution);
  require_pointer("scores", args.scores, args.batch * args.heads * args.seqlen_k > 0);
  require_pointer("intervals", args.intervals, args.batch * args.heads * args.seqlen_k > 0);
  require_workspace(execution, call.bytes);
  call.run(args, execution);
}

const SelectionBackend selection_backend = {
    .plan_select = make_plan<SelectCall>,
    .tile_lists_workspace_size = [](const TileListArgs& args,
                                    const Execution&) { return tile_lists_workspace_size(args); },
    .tile_list_entries = [](const TileListArgs& args,
                            const Execution&) { return args.lists() * tile_list_capacity(args); },
    .build_tile_lists = build_tile_lists,
    .measure_workspace_size = [](const TileListArgs& args,
                                 const Execution&) { return measure_workspace_size(args); },
    .measure_key_bound = measure_key_bound,
    .key_list_stride = key_list_stride,
    .select_list_workspace_size = select_list_workspace_size,
    .select_key_list = select_key_list,
    .rank_workspace_size = rank_workspace_size,
    .rank_keys = rank_keys,
};

// ---- The order alone ----------------------------------------------------------------------------

namespace {

// The layout for a selection of one key, whose intervals are not read.
per_query::Work ordered_rows(const SelectionArgs& args, WorkspaceAllocator& workspace) {
  SelectionArgs of_one = args;
  of_one.keep.window = 1;
  of_one.intervals = workspace.take<KeyInterval>(args.batch * args.heads * args.seqlen_k);
  return per_query::lay_out(of_one, rows_per_batch(of_one), per_query::Result::order, workspace);
}

}  // namespace

std::size_t order_workspace_size(const SelectionArgs& args) {
  validate(args);
  WorkspaceAllocator workspace(nullptr);
  if (args.batch * args.heads * args.seqlen_k > 0) ordered_rows(args, workspace);
  return workspace.used();
}

void order_keys(const SelectionArgs& args, std::int32_t* key_of_rank, std::int32_t* rank_of_key,
                const Execution& execution) {
  const std::int64_t all_rows = args.batch * args.heads;
  require_workspace(execution, order_workspace_size(args));
  if (all_rows * args.seqlen_k == 0) return;
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  WorkspaceAllocator workspace(execution.workspace);
  per_query::Work work = ordered_rows(args, workspace);
  for_each_batch(work.rows, all_rows, [&] {
    per_query::store_order(per_query::sort_keys(work, stream), key_of_rank, rank_of_key, stream);
  });
}

}  // namespace flash_dmattn::cuda
