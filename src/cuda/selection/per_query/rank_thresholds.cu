#include "cuda/selection/per_query/rank_thresholds.cuh"

#include <cstdint>

#include "cuda/selection/per_query/per_query.h"

namespace flash_dmattn::cuda::per_query {
namespace {

// A CTA computes a chunk of ranks from w on.
__global__ void __launch_bounds__(threads, 2) compute_chunks(OrderedRows rows) {
  wait_for_previous_kernel();
  __shared__ ChunkStorage shared;
  const int computed = rows.computed_chunks();
  const int row = static_cast<int>(blockIdx.x) / computed;
  compute_chunk(rows, row, static_cast<int>(blockIdx.x) % computed + rows.first_computed(), shared);
}

}  // namespace

void compute_intervals(const OrderedRows& rows, cudaStream_t stream) {
  if (rows.are_computed_by_sort()) return;
  launch_grid<compute_chunks>({std::int64_t{rows.rows} * rows.computed_chunks(), threads}, stream,
                              rows);
}

}  // namespace flash_dmattn::cuda::per_query
