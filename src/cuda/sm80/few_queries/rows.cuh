#pragma once

#include "cuda/attention/recomputed_row.cuh"
#include "cuda/primitives/integers.h"
#include "cuda/sm80/few_queries/params.h"

namespace flash_dmattn::cuda::sm80::few_queries {

// A block's part of the keys of a (batch, kv head). Parts from `splits` on have none.
struct BlockPart {
  int batch;
  int kv_head;
  int row_tile;
  int split;
  int splits;

  // Block `number`, if every (batch, kv head) has as many parts.
  __device__ BlockPart(const Params& p, int number) : splits(p.split.splits) {
    split = number % splits;
    number /= splits;
    row_tile = number % p.split.row_tiles;
    number /= p.split.row_tiles;
    batch = number / p.shape.heads_kv;
    kv_head = number % p.shape.heads_kv;
  }
  // Block `number` of a cache whose heads have different numbers of slots.
  __device__ BlockPart(const StepParams& p, const HeadBlocks& blocks, int number) : row_tile(0) {
    const int place = head_at(blocks.first, p.shape.heads_kv, number / p.shape.batch);
    const int first = blocks.first[place];
    const int parts = blocks.first[place + 1] - first;
    const int of_head = number - first * p.shape.batch;
    batch = of_head / parts;
    split = of_head % parts;
    kv_head = blocks.head[place];
    splits = p.split.in_cluster ? blocks.used[place] : parts;
  }
};

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
