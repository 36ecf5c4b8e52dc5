#include "cuda/selection/chunk.cuh"

#include <algorithm>
#include <cstdint>

#include "cuda/common/launch.h"

namespace flash_dmattn::cuda::chunk {
namespace {

// A kept key, or one of a query, is evicted by the query's key with which w keys beat it. Four threads share the
// comparisons of a key with the kept ones.
struct EvictKeysKernel {
  using Params = Work;
  static constexpr int keys = 64;
  static constexpr int parts = 4;
  static constexpr int threads = keys * parts;
  static constexpr int min_blocks = 4;

  struct SharedStorage {
    std::uint64_t kept[threads];
    std::uint64_t own[most_queries];  // of the queries
    int better[parts][keys];
  };

  static __host__ __device__ int row_blocks(const Params& p) {
    return ceil_div(p.rows.window + p.seqlen_q, keys);
  }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const int row = static_cast<int>(blockIdx.x) / row_blocks(p);
    const int index =
        static_cast<int>(blockIdx.x) % row_blocks(p) * keys + static_cast<int>(threadIdx.x) % keys;
    const int part = static_cast<int>(threadIdx.x) / keys;
    const int count = p.kept.count[row];
    const int past = p.rows.seqlen_k;
    const int query = index - count;  // of a query's own key
    const bool exists = query < p.seqlen_q;
    const int position = query < 0 ? kept(p, row, index) : past + query;
    const std::uint64_t number = exists ? number_of(p, row, position) : 0;
    if (threadIdx.x < most_queries) {
      const int own = static_cast<int>(threadIdx.x);
      shared.own[own] = own < p.seqlen_q ? number_of(p, row, past + own) : 0;
    }

    int better = 0;
    for (int first = 0; first < count; first += threads) {
      const int other = first + static_cast<int>(threadIdx.x);
      __syncthreads();
      shared.kept[threadIdx.x] = other < count ? number_of(p, row, kept(p, row, other)) : 0;
      __syncthreads();
#pragma unroll 16
      for (int i = 0; i < keys; ++i) better += shared.kept[part * keys + i] > number ? 1 : 0;
    }
    shared.better[part][threadIdx.x % keys] = better;
    __syncthreads();
    if (part > 0 || !exists) return;

#pragma unroll
    for (int i = 1; i < parts; ++i) better += shared.better[i][threadIdx.x];
    int last = better < p.rows.window ? p.seqlen_q : 0;
    for (int i = 0; i < p.seqlen_q; ++i) {
      better += shared.own[i] > number ? 1 : 0;
      if (better >= p.rows.window) last = min(last, i);
    }
    const int first = max(query, 0);
    const bool is_seen = first < last && number >> 32 != ScoredKeys::never;
    const std::int64_t pitch = past + p.seqlen_q;
    store(p.rows.intervals + (p.rows.first_row + row) * pitch + position,
          is_seen ? KeyInterval{first, last} : KeyInterval{0, 0});
  }

 private:
  static __device__ int kept(const Params& p, int row, int i) {
    return p.kept.keys[static_cast<std::int64_t>(row) * p.rows.window + i];
  }
  // The higher one beats the other.
  static __device__ std::uint64_t number_of(const Params& p, int row, int position) {
    return static_cast<std::uint64_t>(p.rows.keys.code(p.rows.first_row + row, position)) << 32 |
           static_cast<std::uint32_t>(position);
  }
};

int rows_of(const SelectionArgs& args) { return static_cast<int>(args.batch * args.heads); }

int past_of(const SelectionArgs& args) { return static_cast<int>(args.seqlen_k - args.seqlen_q); }

}  // namespace

bool applies(const SelectionArgs& args) {
  // Kept keys are compared with each other: more of them take longer than sorting.
  constexpr std::int64_t most_kept = 8192;
  return args.seqlen_q <= most_queries && args.window <= most_kept &&
         args.seqlen_k - args.seqlen_q > args.window && args.batch * args.heads <= 1024 &&
         global::cluster_blocks(rows_of(args), past_of(args)) > 0;
}

Work lay_out(const SelectionArgs& args, WorkspaceAllocator& workspace) {
  Work work;
  WorkspaceAllocator none(nullptr);
  work.rows = global::lay_out(args, rows_of(args), none);
  work.rows.seqlen_k = past_of(args);
  work.seqlen_q = static_cast<int>(args.seqlen_q);
  work.blocks = global::cluster_blocks(rows_of(args), past_of(args));
  work.kept.keys = workspace.take<std::int32_t>(std::int64_t{rows_of(args)} * args.window);
  work.kept.count = workspace.take<std::int32_t>(rows_of(args));
  return work;
}

void select(const Work& work, cudaStream_t stream) {
  global::select_best_in_clusters(work.rows, work.blocks, work.rows.seqlen_k + work.seqlen_q,
                                  work.kept, stream);
  launch<EvictKeysKernel>(std::int64_t{work.rows.rows} * EvictKeysKernel::row_blocks(work), work,
                          stream);
}

}  // namespace flash_dmattn::cuda::chunk
