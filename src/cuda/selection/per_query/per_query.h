#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/selection/order/rank_order.cuh"
#include "cuda/selection/order/row_passes.cuh"

// The stages of a selection per query: the keys of a batch of rows are sorted, best first; their ranks are scattered to
// their positions; and the threshold of each rank gives its interval.
namespace flash_dmattn::cuda::per_query {

struct Work {
  OrderedRows rows;
  RowWindows windows;
  ScoredKeys keys;
  std::uint64_t* packed =
      nullptr;  // [rows, Sk], twice: the sorted array, and the sort's other buffer
  std::uint64_t* other = nullptr;
  RowPasses passes;
  void* sort_workspace = nullptr;
  std::size_t sort_bytes = 0;
};

// Lays out the workspace for batches of at most `batch_rows` rows. The call has one window, or windows for at most
// RowWindows::most_heads heads.
Work lay_out(const SelectionArgs& args, int batch_rows, WorkspaceAllocator& workspace);

// Sorts the keys of a batch and scatters their ranks (rank_order.cu).
OrderedRows sort_keys(const Work& work, cudaStream_t stream);

// Writes the intervals of all keys whose ranks are not among the first w (rank_thresholds.cu).
void compute_intervals(const OrderedRows& rows, const RowWindows& windows, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::per_query
