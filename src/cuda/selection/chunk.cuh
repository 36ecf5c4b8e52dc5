#pragma once

#include <cstddef>

#include "cuda/selection/global.cuh"

// The choice per query of few queries behind many keys: of the keys before the first query only the w best are seen by
// any, and each of these is evicted by one of the queries' own keys, or stays.
namespace flash_dmattn::cuda::chunk {

inline constexpr int most_queries = 64;

struct Work {
  global::RadixRows rows;  // of the keys before the first query
  global::KeptKeys kept;
  int seqlen_q = 0;
  int blocks = 0;  // of a cluster
};

// Whether a causal choice per query is one of these, and its rows are few enough.
bool applies(const SelectionArgs& args);

Work lay_out(const SelectionArgs& args, WorkspaceAllocator& workspace);
void select(const Work& work, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::chunk
