#include "cuda/selection/order/rank_order.cuh"

#include <algorithm>
#include <cstdint>

#include <cub/device/device_radix_sort.cuh>

#include "cuda/selection/order/row_sort.cuh"
#include "cuda/selection/per_query/per_query.h"

namespace flash_dmattn::cuda::per_query {
namespace {

// ---- Kernels ------------------------------------------------------------------------------------

constexpr int pack_threads = 256;
constexpr int pack_keys = 4;  // of a thread

// Makes the sort keys of a batch in the order of falling positions.
__global__ void __launch_bounds__(pack_threads)
    pack_keys_of_rows(ScoredKeys keys, OrderedRows rows, std::uint64_t* packed) {
  wait_for_previous_kernel();
  const int blocks_per_row = ceil_div(rows.seqlen_k, pack_threads * pack_keys);
  const int row = static_cast<int>(blockIdx.x) / blocks_per_row;
  const int begin = static_cast<int>(blockIdx.x) % blocks_per_row * pack_threads * pack_keys;
  const KeysDescending<pack_keys> own(keys, rows, row, begin + static_cast<int>(threadIdx.x),
                                      pack_threads);
#pragma unroll
  for (int i = 0; i < pack_keys; ++i) {
    const int position = own.position[i];
    if (position < 0) return;
    packed[static_cast<std::int64_t>(row) * rows.seqlen_k + rows.seqlen_k - 1 - position] =
        rows.layout.pack(row, own.code[i], position);
  }
}

// A CTA for each group of chunks inverts the order, counts the positions of the chunks by block, and writes the
// intervals that do not depend on T: the w best keys and keys that are never chosen. A group's own count is where the
// count of earlier groups will be.
__global__ void __launch_bounds__(threads)
    scatter_ranks(OrderedRows rows, RowWindows windows, const std::uint64_t* sorted) {
  wait_for_previous_kernel();
  __shared__ int counts[max_blocks];
  const int row = static_cast<int>(blockIdx.x) / rows.groups;
  const int group = static_cast<int>(blockIdx.x) % rows.groups;
  windows.set(rows, row);
  const int thread = static_cast<int>(threadIdx.x);
  for (int b = thread; b < rows.blocks; b += threads) counts[b] = 0;
  const std::uint64_t* const sorted_row = sorted + static_cast<std::int64_t>(row) * rows.seqlen_k;
  const int first_chunk = group * rows.group_chunks;
  const int end_chunk = min(first_chunk + rows.group_chunks, rows.chunks);
  for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
    __syncthreads();
    std::uint16_t* const before_in_group = rows.before_in_group_of(row, chunk);
    for (int b = thread; b < rows.blocks; b += threads) {
      before_in_group[b] = static_cast<std::uint16_t>(counts[b]);
    }
    __syncthreads();
    const int end = rows.chunk_end(chunk);
#pragma unroll 2
    for (int rank = rows.chunk_begin(chunk) + thread; rank < end; rank += threads) {
      const std::uint64_t key = sorted_row[rank];
      const int position = rows.layout.position(key);
      const bool valid = rows.layout.valid(key);
      scatter_rank(rows, row, rank, position, valid);
      if (valid) atomicAdd(&counts[position / block_positions], 1);
    }
  }
  __syncthreads();
  std::uint32_t* const in_group = rows.before_group_of(row, group);
  for (int b = thread; b < rows.blocks; b += threads) {
    in_group[b] = static_cast<std::uint32_t>(counts[b]);
  }
}

constexpr int sum_threads = 128;

// Turns the counts of groups into those of all earlier groups. A thread has a block of positions.
__global__ void __launch_bounds__(sum_threads) sum_earlier_groups(OrderedRows rows) {
  wait_for_previous_kernel();
  const int row_ctas = ceil_div(rows.blocks, sum_threads);
  const int row = static_cast<int>(blockIdx.x) / row_ctas;
  const int block =
      static_cast<int>(blockIdx.x) % row_ctas * sum_threads + static_cast<int>(threadIdx.x);
  if (block >= rows.blocks) return;
  constexpr int together = 16;  // loads in flight at a time
  std::uint32_t before = 0;
  for (int first = 0; first < rows.groups; first += together) {
    std::uint32_t count[together];
#pragma unroll
    for (int i = 0; i < together; ++i) {
      count[i] = rows.before_group_of(row, min(first + i, rows.groups - 1))[block];
    }
#pragma unroll
    for (int i = 0; i < together; ++i) {
      if (first + i >= rows.groups) break;
      rows.before_group_of(row, first + i)[block] = before;
      before += count[i];
    }
  }
}

// ---- Sorting ------------------------------------------------------------------------------------

using ShortRowSort = RowSort<512>;
using LongRowSort = RowSort<1024>;

// The way in which keys are sorted: a CTA for each row, kernels that sort all rows by a digit, or CUB.
enum class Sort : std::uint8_t { rows, digits, device };

Sort sort_of(const OrderedRows& rows) {
  if (rows.seqlen_k <= LongRowSort::max_keys) return Sort::rows;
  return rows.seqlen_k <= RowPasses::max_keys ? Sort::digits : Sort::device;
}

template <class RowSort>
void sort_rows(const Work& work, const OrderedRows& rows, cudaStream_t stream) {
  launch_grid<sort_row<RowSort::threads>>({rows.rows, RowSort::threads}, stream, work.keys, rows,
                                          work.windows);
}

// Sorts the packed keys; the result is where `buffers` points. The positions in the low bits are in order and stay so
// among equal scores, because the sort is stable. With a null workspace it only sets `bytes`.
void sort(const OrderedRows& rows, cub::DoubleBuffer<std::uint64_t>& buffers, void* workspace,
          std::size_t& bytes, cudaStream_t stream) {
  const int begin_bit = rows.layout.position_bits;
  const int end_bit = begin_bit + rows.layout.score_bits + bits_for(rows.rows);
  check(cub::DeviceRadixSort::SortKeys(workspace, bytes, buffers, rows.rows * rows.seqlen_k,
                                       begin_bit, end_bit, stream),
        "sorting scores");
}

// Sorts and scatters in the CTAs that sort the rows.
void sort_and_scatter(const Work& work, OrderedRows& rows, cudaStream_t stream) {
  if (work.packed != nullptr) rows.store_order_in(work.packed);
  rows.seqlen_k <= ShortRowSort::max_keys ? sort_rows<ShortRowSort>(work, rows, stream)
                                          : sort_rows<LongRowSort>(work, rows, stream);
}

void sort_then_scatter(const Work& work, OrderedRows& rows, cudaStream_t stream) {
  cub::DoubleBuffer<std::uint64_t> buffers(work.packed, work.other);
  const int pack_ctas = ceil_div(rows.seqlen_k, pack_threads * pack_keys);
  launch_grid<pack_keys_of_rows>({std::int64_t{rows.rows} * pack_ctas, pack_threads}, stream,
                                 work.keys, rows, work.packed);
  std::size_t bytes = work.sort_bytes;
  sort(rows, buffers, work.sort_workspace, bytes, stream);
  rows.store_order_in(buffers.Alternate());  // free after the sort
  launch_grid<scatter_ranks>({std::int64_t{rows.rows} * rows.groups, threads}, stream, rows,
                             work.windows, buffers.Current());
  const int sum_ctas = ceil_div(rows.blocks, sum_threads);
  launch_grid<sum_earlier_groups>({std::int64_t{rows.rows} * sum_ctas, sum_threads}, stream, rows);
}

// Sets the windows of rows, and the numbers of chunks that follow from them.
void set_windows(const SelectionArgs& args, Work& work) {
  OrderedRows& rows = work.rows;
  const auto set = [&](std::int64_t window) {
    rows.window = static_cast<int>(std::min(window, args.seqlen_k));
    const int chunks = 1 + ceil_div(rows.seqlen_k - rows.window % chunk_ranks, chunk_ranks);
    rows.chunks = std::max(rows.chunks, chunks);
    rows.computed = std::max(rows.computed, chunks - rows.first_computed());
  };
  const std::int64_t* const windows = args.rule.head_windows;
  if (windows == nullptr) return set(args.rule.window);
  work.windows.heads = static_cast<int>(args.heads);
  for (int h = 0; h < work.windows.heads; ++h) {
    set(windows[h]);
    work.windows.window[h] = rows.window;
  }
}

}  // namespace

Work lay_out(const SelectionArgs& args, int batch_rows, WorkspaceAllocator& workspace) {
  Work work;
  OrderedRows& rows = work.rows;
  rows.rows = batch_rows;
  rows.seqlen_k = static_cast<int>(args.seqlen_k);
  rows.layout = {.position_bits = bits_for(args.seqlen_k),
                 .score_bits = score_bits(args.scores_dtype),
                 .seqlen_k = rows.seqlen_k};
  rows.queries = QueryClip(args);
  rows.intervals = args.intervals;
  set_windows(args, work);
  // A thread sums over the groups, so groups are few unless that would leave the GPU idle. The kernels that sort and
  // scatter at once count chunk by chunk.
  const bool has_groups = sort_of(rows) == Sort::device;
  rows.group_chunks = has_groups ? std::min(ceil_div(rows.chunks, 64), max_group_chunks) : 1;
  rows.groups = ceil_div(rows.chunks, rows.group_chunks);
  rows.blocks = ceil_div(rows.seqlen_k, block_positions);
  work.keys = ScoredKeys(args);
  if (rows.can_be_kept_by_sort()) return work;

  // Each buffer is large enough for packed keys.
  work.packed = workspace.take<std::uint64_t>(rows.order_words());
  if (sort_of(rows) != Sort::rows) work.other = workspace.take<std::uint64_t>(rows.order_words());
  const std::int64_t blocks = std::int64_t{rows.rows} * rows.blocks;
  std::uint32_t* const counts = workspace.take<std::uint32_t>(blocks * rows.groups);
  (has_groups ? rows.before_group : rows.totals) = counts;
  if (has_groups) rows.before_in_group = workspace.take<std::uint16_t>(blocks * rows.chunks);
  if (sort_of(rows) == Sort::digits) {
    work.passes.tiles = ceil_div(rows.seqlen_k, RowPasses::tile_keys);
    work.passes.passes = rows.layout.score_bits / RowPasses::digit_bits;
    const std::int64_t counts =
        std::int64_t{work.passes.passes} * rows.rows * work.passes.tiles * RowPasses::digits;
    work.passes.counts = workspace.take<std::uint32_t>(counts);
    work.passes.published = workspace.take<std::uint32_t>(counts);
    work.passes.started = workspace.take<std::uint32_t>(work.passes.passes);
  } else if (sort_of(rows) == Sort::device) {
    cub::DoubleBuffer<std::uint64_t> buffers(work.packed, work.other);
    sort(rows, buffers, nullptr, work.sort_bytes, nullptr);
    work.sort_workspace = workspace.take<char>(static_cast<std::int64_t>(work.sort_bytes));
  }
  return work;
}

OrderedRows sort_keys(const Work& work, cudaStream_t stream) {
  OrderedRows rows = work.rows;
  switch (sort_of(rows)) {
    case Sort::rows: sort_and_scatter(work, rows, stream); break;
    case Sort::digits:
      sort_passes(work.keys, rows, work.windows, work.passes, work.packed, work.other, stream);
      break;
    case Sort::device: sort_then_scatter(work, rows, stream); break;
  }
  return rows;
}

}  // namespace flash_dmattn::cuda::per_query
