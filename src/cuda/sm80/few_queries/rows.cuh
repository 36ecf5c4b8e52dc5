#pragma once

#include "cuda/attention/recomputed_row.cuh"
#include "cuda/sm80/few_queries/params.h"

namespace flash_dmattn::cuda::sm80::few_queries {

// The rows of a block are the queries of all heads that share a kv head, so that one tile of K and V is used for all of
// them. The heads of a query are adjacent.
struct GroupRows {
  int batch;
  int kv_head;
  int group;
  int first;  // row of the block, in [0, Sq group)
  int count;  // rows that exist

  // The head of a row, in [0, group), and its query. Rows past the end map to the last row.
  __device__ int member(int row) const { return (first + min(row, count - 1)) % group; }
  __device__ int query(int row) const { return (first + min(row, count - 1)) / group; }

  // The rows as a tile of queries.
  struct Queries {
    int batch;
    int kv_head;
    int row;
  };
  __device__ Queries queries() const { return {batch, kv_head, first_query()}; }

  __device__ int first_query() const { return first / group; }
  __device__ int end_query() const { return (first + count - 1) / group + 1; }
  __device__ int first_head() const { return kv_head * group; }

  __device__ QueryHead head(int row) const { return {batch, first_head() + member(row), kv_head}; }
};

}  // namespace flash_dmattn::cuda::sm80::few_queries
