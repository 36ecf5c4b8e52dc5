#include <algorithm>
#include <cstdint>
#include <string>

#include <cub/device/device_radix_sort.cuh>

#include "arguments.h"
#include "cuda/selection/device.cuh"
#include "cuda/selection/global.cuh"
#include "cuda/selection/rank_walk.cuh"
#include "cuda/selection/row_passes.cuh"
#include "cuda/selection/row_sort.cuh"
#include "cuda/selection/selection.h"

namespace flash_dmattn::cuda {
namespace {

// Rows are sorted in batches of this many keys, which bounds the workspace to 16 bytes for each.
// 8 rows of 524288 keys are one batch.
constexpr std::int64_t batch_keys = std::int64_t{1} << 22;
constexpr std::int64_t batch_rows = 1024;

int score_bits(const SelectionArgs& args) { return args.scores_dtype == DType::f32 ? 32 : 16; }

// The way a selection is computed. Without causality, or with a single query, all queries may see
// the same keys and the choice is global.
enum class Method : std::uint8_t { none, keep_valid, global, per_query };

Method method_of(const SelectionArgs& args) {
  if (args.window == 0) return Method::none;
  if (args.window >= args.seqlen_k) return Method::keep_valid;
  const bool per_query = args.selection == Selection::per_query && args.causal && args.seqlen_q > 1;
  return per_query ? Method::per_query : Method::global;
}

std::int64_t rows_per_batch(const SelectionArgs& args) {
  const std::int64_t fitting = batch_keys / std::max<std::int64_t>(args.seqlen_k, 1);
  return std::clamp<std::int64_t>(std::min(fitting, args.batch * args.heads), 1, batch_rows);
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
  if (args.window < 0) {
    throw InvalidArgument("window", std::to_string(args.window), "at least 0");
  }
  if (args.selection != Selection::per_query && args.selection != Selection::global) {
    throw InvalidArgument("selection", std::to_string(static_cast<int>(args.selection)),
                          "per_query or global");
  }
  if (args.scores_dtype > DType::f16) {
    throw InvalidArgument("scores_dtype", std::to_string(static_cast<int>(args.scores_dtype)),
                          "f32, bf16 or f16 on a GPU");
  }
}

namespace {

ScoredKeys scored_keys(const SelectionArgs& args) {
  ScoredKeys keys;
  keys.scores = args.scores;
  keys.mask = args.key_mask;
  keys.dtype = args.scores_dtype;
  keys.heads = static_cast<int>(args.heads);
  std::copy(args.scores_stride.begin(), args.scores_stride.end(), keys.stride);
  std::copy(args.key_mask_stride.begin(), args.key_mask_stride.end(), keys.mask_stride);
  return keys;
}

QueryRange query_range(const SelectionArgs& args) {
  return {.seqlen_q = static_cast<int>(args.seqlen_q),
          .shift = static_cast<int>(args.seqlen_k - args.seqlen_q),
          .causal = args.causal};
}

// Calls enqueue() for every batch of rows, which it describes in `rows`.
template <class Rows, class Enqueue>
void for_each_batch(Rows& rows, std::int64_t all_rows, const Enqueue& enqueue) {
  const std::int64_t step = rows.rows;
  for (std::int64_t row = 0; row < all_rows; row += step) {
    rows.first_row = static_cast<int>(row);
    rows.rows = static_cast<int>(std::min(step, all_rows - row));
    enqueue();
  }
}

// ---- Global -------------------------------------------------------------------------------------

global::Rows global_rows(const SelectionArgs& args, Carver& workspace) {
  global::Rows rows;
  rows.keys = scored_keys(args);
  rows.queries = query_range(args);
  rows.intervals = args.intervals;
  rows.rows = static_cast<int>(rows_per_batch(args));
  rows.seqlen_k = static_cast<int>(args.seqlen_k);
  rows.window = static_cast<int>(std::min(args.window, args.seqlen_k));
  rows.position_bits = bits_for(args.seqlen_k);
  rows.number_bits = rows.position_bits + score_bits(args);
  if (method_of(args) == Method::global) {
    const std::int64_t row_digits = std::int64_t{rows.digits()} * rows.rows;
    rows.histograms = workspace.take<std::uint32_t>(row_digits * global::bins);
    rows.found = workspace.take<global::Found>(row_digits);
  }
  return rows;
}

void select_global(const global::Rows& rows, cudaStream_t stream) {
  const std::int64_t ctas = std::int64_t{rows.rows} * rows.ctas_per_row();
  const std::size_t histogram_bytes =
      sizeof(std::uint32_t) * global::bins * static_cast<std::size_t>(rows.digits() * rows.rows);
  check(cudaMemsetAsync(rows.histograms, 0, histogram_bytes, stream), "clearing histograms");
  for (int digit = 0; digit < rows.digits(); ++digit) {
    launch_grid(global::count_digit, {ctas, global::threads}, stream, rows, digit);
  }
  launch_grid(global::keep_best, {ctas, global::threads}, stream, rows);
}

// ---- Per query ----------------------------------------------------------------------------------

struct PerQuery {
  per_query::Rows rows;
  ScoredKeys keys;
  std::uint64_t* packed =
      nullptr;  // [rows, Sk], twice: the sorted array, and the sort's other buffer
  std::uint64_t* other = nullptr;
  per_query::RowPasses passes;
  void* sort_workspace = nullptr;
  std::size_t sort_bytes = 0;
};

using ShortRowSort = per_query::RowSort<512>;
using LongRowSort = per_query::RowSort<1024>;

// How the keys are sorted: a CTA for each row, kernels that sort all rows by a digit, or CUB.
enum class Sort : std::uint8_t { rows, digits, device };

Sort sort_of(const per_query::Rows& rows) {
  if (rows.seqlen_k <= LongRowSort::max_keys) return Sort::rows;
  return rows.seqlen_k <= per_query::RowPasses::max_keys ? Sort::digits : Sort::device;
}

template <class RowSort>
void sort_rows(const PerQuery& work, const per_query::Rows& rows, cudaStream_t stream) {
  launch_grid(per_query::sort_row<RowSort::threads>, {rows.rows, RowSort::threads}, stream,
              work.keys, rows, work.packed);
}

void sort_digits(const PerQuery& work, cub::DoubleBuffer<std::uint64_t>& buffers,
                 cudaStream_t stream) {
  const Grid grid{std::int64_t{work.rows.rows} * work.passes.tiles, per_query::RowPasses::threads};
  launch_grid(per_query::pack_and_count, grid, stream, work.keys, work.rows, work.passes,
              buffers.Current());
  for (int pass = 0; pass < work.passes.passes; ++pass) {
    launch_grid(per_query::sort_digit, grid, stream, work.rows, work.passes, pass,
                buffers.Current(), buffers.Alternate());
    buffers.selector ^= 1;
  }
}

// Sorts the packed keys; the result is where `buffers` points. The positions in the low bits come in
// order and stay so among equals, the sort being stable. With a null workspace it only sets
// `bytes`.
void sort(const per_query::Rows& rows, cub::DoubleBuffer<std::uint64_t>& buffers, void* workspace,
          std::size_t& bytes, cudaStream_t stream) {
  const int begin_bit = rows.layout.position_bits;
  const int end_bit = begin_bit + rows.layout.score_bits + bits_for(rows.rows);
  check(cub::DeviceRadixSort::SortKeys(workspace, bytes, buffers, rows.rows * rows.seqlen_k,
                                       begin_bit, end_bit, stream),
        "sorting scores");
}

PerQuery per_query_rows(const SelectionArgs& args, Carver& workspace) {
  PerQuery work;
  per_query::Rows& rows = work.rows;
  rows.rows = static_cast<int>(rows_per_batch(args));
  rows.seqlen_k = static_cast<int>(args.seqlen_k);
  rows.window = static_cast<int>(args.window);
  rows.layout = {.position_bits = bits_for(args.seqlen_k),
                 .score_bits = score_bits(args),
                 .seqlen_k = rows.seqlen_k};
  rows.queries = query_range(args);
  rows.intervals = args.intervals;
  rows.chunks =
      1 + ceil_div(rows.seqlen_k - rows.window % per_query::chunk_ranks, per_query::chunk_ranks);
  // A walk sums over the groups before its own: few, unless that would leave the GPU idle.
  rows.group_chunks = std::min(ceil_div(rows.chunks, 64), per_query::max_group_chunks);
  rows.groups = ceil_div(rows.chunks, rows.group_chunks);
  rows.blocks = ceil_div(rows.seqlen_k, per_query::block_positions);
  work.keys = scored_keys(args);

  const std::int64_t keys = std::int64_t{rows.rows} * rows.seqlen_k;
  work.packed = workspace.take<std::uint64_t>(keys);
  // Ranks come here, in rows rounded up to 4.
  const std::int64_t ranks = std::int64_t{rows.rows} * ceil_div(rows.seqlen_k, 4) * 4;
  work.other = workspace.take<std::uint64_t>(std::max(keys, ranks / 2));
  const std::int64_t blocks = std::int64_t{rows.rows} * rows.blocks;
  rows.before = workspace.take<std::uint16_t>(blocks * rows.chunks);
  rows.totals = workspace.take<std::uint16_t>(blocks * rows.groups);
  if (sort_of(rows) == Sort::digits) {
    work.passes.tiles = ceil_div(rows.seqlen_k, per_query::RowPasses::tile_keys);
    work.passes.passes = rows.layout.score_bits / per_query::RowPasses::digit_bits;
    const std::int64_t counts = std::int64_t{work.passes.passes} * rows.rows * work.passes.tiles *
                                per_query::RowPasses::digits;
    work.passes.counts = workspace.take<std::uint32_t>(counts);
    work.passes.announced = workspace.take<std::uint32_t>(counts);
  } else if (sort_of(rows) == Sort::device) {
    cub::DoubleBuffer<std::uint64_t> buffers(work.packed, work.other);
    sort(rows, buffers, nullptr, work.sort_bytes, nullptr);
    work.sort_workspace = workspace.take<char>(static_cast<std::int64_t>(work.sort_bytes));
  }
  return work;
}

// By the CTAs that sort the rows.
void sort_and_place(const PerQuery& work, per_query::Rows& rows, cudaStream_t stream) {
  rows.sorted = work.packed;
  rows.rank_of = reinterpret_cast<std::int32_t*>(work.other);
  rows.seqlen_k <= ShortRowSort::max_keys ? sort_rows<ShortRowSort>(work, rows, stream)
                                          : sort_rows<LongRowSort>(work, rows, stream);
}

void sort_then_place(const PerQuery& work, per_query::Rows& rows, cudaStream_t stream) {
  cub::DoubleBuffer<std::uint64_t> buffers(work.packed, work.other);
  if (sort_of(rows) == Sort::digits) {
    sort_digits(work, buffers, stream);
  } else {
    const int pack_ctas = ceil_div(rows.seqlen_k, per_query::pack_threads * per_query::pack_keys);
    launch_grid(per_query::pack_keys_of_rows,
                {std::int64_t{rows.rows} * pack_ctas, per_query::pack_threads}, stream, work.keys,
                rows, work.packed);
    std::size_t bytes = work.sort_bytes;
    sort(rows, buffers, work.sort_workspace, bytes, stream);
  }
  rows.sorted = buffers.Current();
  rows.rank_of = reinterpret_cast<std::int32_t*>(buffers.Alternate());  // free after the sort
  launch_grid(per_query::place_ranks, {std::int64_t{rows.rows} * rows.groups, per_query::threads},
              stream, rows);
}

// The batch with its sorted keys, their ranks placed.
per_query::Rows sort_keys(const PerQuery& work, cudaStream_t stream) {
  per_query::Rows rows = work.rows;
  sort_of(rows) == Sort::rows ? sort_and_place(work, rows, stream)
                              : sort_then_place(work, rows, stream);
  return rows;
}

void select_per_query(const PerQuery& work, cudaStream_t stream) {
  const per_query::Rows rows = sort_keys(work, stream);
  launch_grid(per_query::walk_ranks,
              {std::int64_t{rows.rows} * (rows.chunks - rows.first_walked()), per_query::threads},
              stream, rows);
}

}  // namespace

std::size_t select_workspace_size(const SelectionArgs& args) {
  validate(args);
  Carver workspace(nullptr);
  if (args.batch * args.heads * args.seqlen_k == 0) return 0;
  if (method_of(args) == Method::global) global_rows(args, workspace);
  if (method_of(args) == Method::per_query) per_query_rows(args, workspace);
  return workspace.used();
}

void select_key_intervals(const SelectionArgs& args, const Execution& execution) {
  const std::size_t bytes = select_workspace_size(args);
  const std::int64_t all_rows = args.batch * args.heads;
  if (all_rows * args.seqlen_k == 0) return;
  require_pointer("scores", args.scores, true);
  require_pointer("intervals", args.intervals, true);
  if (reinterpret_cast<std::uintptr_t>(args.intervals) % sizeof(KeyInterval) != 0) {
    throw InvalidArgument("intervals", "a misaligned address", "an address aligned to 8 bytes");
  }
  require_workspace(execution, bytes);

  const auto stream = static_cast<cudaStream_t>(execution.stream);
  const Method method = method_of(args);
  if (method == Method::none) {
    const auto count = static_cast<std::size_t>(all_rows * args.seqlen_k);
    check(cudaMemsetAsync(args.intervals, 0, count * sizeof(KeyInterval), stream),
          "clearing intervals");
    return;
  }
  Carver workspace(execution.workspace);
  if (method == Method::per_query) {
    PerQuery work = per_query_rows(args, workspace);
    for_each_batch(work.rows, all_rows, [&] { select_per_query(work, stream); });
    return;
  }
  global::Rows rows = global_rows(args, workspace);
  for_each_batch(rows, all_rows, [&] {
    if (method == Method::global) {
      select_global(rows, stream);
    } else {
      launch_grid(global::keep_valid,
                  {std::int64_t{rows.rows} * rows.ctas_per_row(), global::threads}, stream, rows);
    }
  });
}

// ---- The order alone ----------------------------------------------------------------------------

namespace {

// As for a choice of one key, whose intervals are not read.
PerQuery ordered_rows(const SelectionArgs& args, Carver& workspace) {
  SelectionArgs of_one = args;
  of_one.window = 1;
  of_one.intervals = workspace.take<KeyInterval>(args.batch * args.heads * args.seqlen_k);
  return per_query_rows(of_one, workspace);
}

}  // namespace

std::size_t order_workspace_size(const SelectionArgs& args) {
  validate(args);
  Carver workspace(nullptr);
  if (args.batch * args.heads * args.seqlen_k > 0) ordered_rows(args, workspace);
  return workspace.used();
}

void order_keys(const SelectionArgs& args, std::int32_t* key_of_rank, std::int32_t* rank_of_key,
                const Execution& execution) {
  const std::int64_t all_rows = args.batch * args.heads;
  require_workspace(execution, order_workspace_size(args));
  if (all_rows * args.seqlen_k == 0) return;
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  Carver workspace(execution.workspace);
  PerQuery work = ordered_rows(args, workspace);
  for_each_batch(work.rows, all_rows, [&] {
    const per_query::Rows rows = sort_keys(work, stream);
    const int blocks = ceil_div(rows.seqlen_k, per_query::order_threads);
    launch_grid(per_query::store_order,
                {std::int64_t{rows.rows} * blocks, per_query::order_threads}, stream, rows,
                key_of_rank, rank_of_key);
  });
}

}  // namespace flash_dmattn::cuda
