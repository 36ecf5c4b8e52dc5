#include "cuda/selection/per_query/rank_thresholds.cuh"

#include <cstdint>

#include "cuda/selection/per_query/per_query.h"

namespace flash_dmattn::cuda::per_query {
namespace {

// A CTA computes a chunk of ranks from w on.
__global__ void __launch_bounds__(threads, 2) compute_chunks(OrderedRows rows, RowWindows windows) {
  wait_for_previous_kernel();
  __shared__ ChunkStorage shared;
  const int row = static_cast<int>(blockIdx.x) / rows.computed;
  windows.set(rows, row);
  compute_chunk(rows, row, static_cast<int>(blockIdx.x) % rows.computed + rows.first_computed(),
                shared);
}

}  // namespace

void compute_intervals(const OrderedRows& rows, const RowWindows& windows, cudaStream_t stream) {
  if (rows.are_computed_by_sort()) return;
  launch_grid<compute_chunks>({std::int64_t{rows.rows} * rows.computed, threads}, stream, rows,
                              windows);
}

}  // namespace flash_dmattn::cuda::per_query
