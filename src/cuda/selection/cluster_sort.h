#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "cuda/selection/rank_order.cuh"

// Sorting few rows of some ten thousand keys in one kernel: a cluster of blocks has a row, whose keys stay in shared
// memory from the first digit to the last.
namespace flash_dmattn::cuda::per_query {

// Blocks of the cluster of a row, as long as all rows run at once; 0: these rows need another sort.
int sort_cluster_blocks(const OrderedRows& rows);

// sorted [rows, Sk], the best first, and the result of scatter_ranks for it.
void sort_in_clusters(const ScoredKeys& keys, const OrderedRows& rows, std::uint64_t* sorted,
                      cudaStream_t stream);

}  // namespace flash_dmattn::cuda::per_query
