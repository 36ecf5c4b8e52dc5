#pragma once

#include <climits>

#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"
#include "cuda/params.h"

// The keys that a query tile visits where there are intervals and no tile lists: from the first to the last
// block of keys that any of its queries sees. Two kernels compute them, from the intervals to blocks of keys
// and from these to query tiles; the host does not wait.
namespace flash_dmattn::cuda {

// Of a block of KeyRun::keys neighbouring keys. Queries [begin, end) meet a key that they see at most
// there; each of [whole_begin, whole_end) sees all the keys.
struct alignas(16) KeyBlock {
  int begin, end;
  int whole_begin, whole_end;
};

struct KeyRunsParams {
  KeyIntervals intervals;
  int heads;  // of the intervals
  int seqlen_q;
  int seqlen_k;
  bool causal;
  KeyBlock* blocks;  // [rows of intervals, key_blocks()]
  KeyRun* runs;      // [rows of intervals, query_tiles()]

  __host__ __device__ int key_blocks() const {
    return (seqlen_k + KeyRun::keys - 1) / KeyRun::keys;
  }
  __host__ __device__ int query_tiles() const {
    return (seqlen_q + plan_tile_rows - 1) / plan_tile_rows;
  }
};

// A warp makes a block of keys.
struct SumKeyBlocksKernel {
  using Params = KeyRunsParams;
  static constexpr int warps = 8;
  static constexpr int threads = warps * 32;
  static constexpr int min_blocks = 1;
  struct SharedStorage {};

  static long blocks(const Params& p, std::int64_t rows) {
    return rows * ((p.key_blocks() + warps - 1) / warps);
  }

  __device__ void operator()(const Params& p, SharedStorage&) const {
    const int row_blocks = (p.key_blocks() + warps - 1) / warps;
    const int row = static_cast<int>(blockIdx.x) / row_blocks;
    const int block = static_cast<int>(blockIdx.x) % row_blocks * warps + warp_id();
    if (block >= p.key_blocks()) return;
    const KeyInterval* const intervals = p.intervals.data +
                                         row / p.heads * p.intervals.stride_batch +
                                         row % p.heads * p.intervals.stride_head;
    KeyBlock mine{INT_MAX, 0, 0, INT_MAX};
#pragma unroll
    for (int i = 0; i < KeyRun::keys; i += 32) {
      const int key = block * KeyRun::keys + i + lane_id();
      int2 seen = {0, 0};  // by nobody, as what does not exist
      if (key < p.seqlen_k) seen = __ldg(reinterpret_cast<const int2*>(intervals) + key);
      if (p.causal) seen.x = max(seen.x, key - (p.seqlen_k - p.seqlen_q));
      seen = {max(seen.x, 0), min(seen.y, p.seqlen_q)};
      if (seen.x < seen.y)
        mine = {min(mine.begin, seen.x), max(mine.end, seen.y), mine.whole_begin, mine.whole_end};
      mine.whole_begin = max(mine.whole_begin, seen.x);
      mine.whole_end = min(mine.whole_end, seen.y);
    }
    mine = {warp_min(mine.begin), warp_max(mine.end), warp_max(mine.whole_begin),
            warp_min(mine.whole_end)};
    if (threadIdx.x % 32 == 0)
      p.blocks[static_cast<std::int64_t>(row) * p.key_blocks() + block] = mine;
  }
};

// A warp makes the run of a query tile; its neighbours in the thread block share the search for where
// their keys are.
struct FindKeyRunsKernel {
  using Params = KeyRunsParams;
  static constexpr int warps = 8;
  static constexpr int threads = warps * 32;
  static constexpr int min_blocks = 1;
  struct SharedStorage {
    int begin[warps];
    int end[warps];
  };

  static long blocks(const Params& p, std::int64_t rows) {
    return rows * ((p.query_tiles() + warps - 1) / warps);
  }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const int row_blocks = (p.query_tiles() + warps - 1) / warps;
    const int row = static_cast<int>(blockIdx.x) / row_blocks;
    const int first_tile = static_cast<int>(blockIdx.x) % row_blocks * warps;
    const KeyBlock* const blocks = p.blocks + static_cast<std::int64_t>(row) * p.key_blocks();
    const int warp = warp_id();
    const int lane = lane_id();

    // The blocks that the queries of any warp meet.
    const int rows_begin = first_tile * plan_tile_rows;
    const int rows_end = rows_begin + warps * plan_tile_rows;
    int begin = INT_MAX;
    int end = 0;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < p.key_blocks(); i += threads) {
      const int2 seen = *reinterpret_cast<const int2*>(&blocks[i].begin);
      if (seen.x >= rows_end || seen.y <= rows_begin) continue;
      begin = min(begin, i);
      end = i + 1;
    }
    begin = warp_min(begin);
    end = warp_max(end);
    if (lane == 0) {
      shared.begin[warp] = begin;
      shared.end[warp] = end;
    }
    __syncthreads();
    begin = warp_min(shared.begin[lane % warps]);
    end = warp_max(shared.end[lane % warps]);

    const int tile = first_tile + warp;
    if (tile >= p.query_tiles()) return;
    const KeyRun run = find(p, blocks, begin, end, tile * plan_tile_rows);
    if (lane == 0) p.runs[static_cast<std::int64_t>(row) * p.query_tiles() + tile] = run;
  }

 private:
  // Among blocks [begin, end).
  static __device__ KeyRun find(const Params& p, const KeyBlock* blocks, int begin, int end,
                                int row_begin) {
    const int row_end = min(row_begin + plan_tile_rows, p.seqlen_q);
    int first = INT_MAX;
    int last = -1;
    int2 whole = {0, 0};      // the longest run of blocks that all queries see whole
    int whole_begin = begin;  // of the run that may go on
    const auto end_whole = [&](int at) {
      if (at - whole_begin > whole.y - whole.x) whole = {whole_begin, at};
      whole_begin = at + 1;
    };
    for (int from = begin; from < end; from += 32) {
      const int block = from + lane_id();
      KeyBlock seen{INT_MAX, 0, INT_MAX, 0};
      if (block < end) seen = blocks[block];
      const bool touched = seen.begin < row_end && seen.end > row_begin;
      const unsigned touched_blocks = warp_ballot(touched);
      if (touched_blocks != 0) {
        first = min(first, from + __ffs(static_cast<int>(touched_blocks)) - 1);
        last = from + 31 - __clz(static_cast<int>(touched_blocks));
      }
      unsigned partial = ~warp_ballot(seen.whole_begin <= row_begin && seen.whole_end >= row_end);
      for (; partial != 0; partial &= partial - 1)
        end_whole(from + __ffs(static_cast<int>(partial)) - 1);
    }
    end_whole(end);
    if (last < 0) return {0, 0, 0, 0};
    return {first * KeyRun::keys, min((last + 1) * KeyRun::keys, p.seqlen_k),
            whole.x * KeyRun::keys, whole.y * KeyRun::keys};
  }
};

}  // namespace flash_dmattn::cuda
