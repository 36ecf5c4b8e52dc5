#pragma once

#include <climits>

#include "cuda/attention/params.h"
#include "cuda/primitives/integers.h"
#include "cuda/primitives/launch.h"
#include "cuda/primitives/warp.cuh"

// The keys that a query tile visits if there are intervals and no tile lists: from the first to the last block of keys
// that any of its queries sees. One kernel computes the bounds of blocks of keys from the intervals, and another
// kernel computes the ranges of query tiles from these bounds. Query tiles of long sequences first read the bounds of
// groups of blocks, because together they would read as many blocks as tiles times blocks. The host does not wait.
namespace flash_dmattn::cuda {

// The queries of a block of KeyRange::keys neighbouring keys: the hull [begin, end) of the keys' intervals, and their
// intersection [full_begin, full_end).
struct alignas(16) KeyBlockQueries {
  int begin, end;
  int full_begin, full_end;
};

struct KeyRangesParams {
  KeyIntervals intervals;
  int heads;  // heads of the intervals
  int seqlen_q;
  int seqlen_k;
  bool causal;
  KeyBlockQueries* blocks;  // [rows of intervals, key_blocks()]
  int2* groups;             // [rows of intervals, key_groups()] begin and end; null for few blocks
  KeyRange* key_ranges;     // [rows of intervals, query_tiles()]

  static constexpr int group_blocks = 64;
  static constexpr int few_blocks = 4096;

  __host__ __device__ int key_blocks() const { return ceil_div(seqlen_k, KeyRange::keys); }
  __host__ __device__ int key_groups() const { return ceil_div(key_blocks(), group_blocks); }
  __host__ __device__ int query_tiles() const { return ceil_div(seqlen_q, query_tile_rows); }
};

// A kernel with a warp for each item of a row of intervals: a block of keys, a group of them, or a query tile.
struct WarpOfRow {
  using Params = KeyRangesParams;
  static constexpr int warps = 8;
  static constexpr int threads = warps * 32;
  static constexpr int min_blocks = 1;
  struct SharedStorage {};
  struct Place {
    int row;
    int first;  // item of the thread block
  };

  static __device__ Place place(int row_items) {
    const int row_blocks = ceil_div(row_items, warps);
    const auto block = static_cast<int>(blockIdx.x);
    return {block / row_blocks, block % row_blocks * warps};
  }
};

// A warp computes the bounds of a block of keys.
struct BoundKeyBlocksKernel : WarpOfRow {
  static long blocks(const Params& p, std::int64_t rows) {
    return rows * ceil_div(p.key_blocks(), warps);
  }
  __device__ void operator()(const Params& p, SharedStorage&) const {
    const auto [row, first] = place(p.key_blocks());
    const int block = first + warp_id();
    if (block >= p.key_blocks()) return;
    const KeyInterval* const intervals = p.intervals.data +
                                         row / p.heads * p.intervals.stride_batch +
                                         row % p.heads * p.intervals.stride_head;
    KeyBlockQueries mine{INT_MAX, 0, 0, INT_MAX};
#pragma unroll
    for (int i = 0; i < KeyRange::keys; i += 32) {
      const int key = block * KeyRange::keys + i + lane_id();
      int2 seen = {0, 0};  // empty by default, also for keys past the end
      if (key < p.seqlen_k) seen = __ldg(reinterpret_cast<const int2*>(intervals) + key);
      if (p.causal) seen.x = max(seen.x, key - (p.seqlen_k - p.seqlen_q));
      seen = {max(seen.x, 0), min(seen.y, p.seqlen_q)};
      if (seen.x < seen.y)
        mine = {min(mine.begin, seen.x), max(mine.end, seen.y), mine.full_begin, mine.full_end};
      mine.full_begin = max(mine.full_begin, seen.x);
      mine.full_end = min(mine.full_end, seen.y);
    }
    mine = {warp_min(mine.begin), warp_max(mine.end), warp_max(mine.full_begin),
            warp_min(mine.full_end)};
    if (lane_id() == 0) p.blocks[static_cast<std::int64_t>(row) * p.key_blocks() + block] = mine;
  }
};

// A warp computes the bounds of a group of blocks of keys.
struct BoundKeyGroupsKernel : WarpOfRow {
  static long blocks(const Params& p, std::int64_t rows) {
    return rows * ceil_div(p.key_groups(), warps);
  }
  __device__ void operator()(const Params& p, SharedStorage&) const {
    const auto [row, first] = place(p.key_groups());
    const int group = first + warp_id();
    if (group >= p.key_groups()) return;
    const KeyBlockQueries* const blocks =
        p.blocks + static_cast<std::int64_t>(row) * p.key_blocks();
    int2 bounds = {INT_MAX, 0};
#pragma unroll
    for (int i = 0; i < Params::group_blocks; i += 32) {
      const int block = group * Params::group_blocks + i + lane_id();
      if (block >= p.key_blocks()) continue;
      const int2 seen = *reinterpret_cast<const int2*>(&blocks[block].begin);
      bounds = {min(bounds.x, seen.x), max(bounds.y, seen.y)};
    }
    bounds = {warp_min(bounds.x), warp_max(bounds.y)};
    if (lane_id() == 0) p.groups[static_cast<std::int64_t>(row) * p.key_groups() + group] = bounds;
  }
};

// A warp computes the key range of a query tile. The warps of a thread block first find together the blocks of keys, or
// groups of them, that intersect any of their tiles.
struct FindKeyRangesKernel : WarpOfRow {
  struct SharedStorage {
    int begin[warps];
    int end[warps];
  };

  static long blocks(const Params& p, std::int64_t rows) {
    return rows * ceil_div(p.query_tiles(), warps);
  }
  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const int row_blocks = ceil_div(p.query_tiles(), warps);
    const int row = static_cast<int>(blockIdx.x) / row_blocks;
    const int first_tile = static_cast<int>(blockIdx.x) % row_blocks * warps;
    const KeyBlockQueries* const blocks =
        p.blocks + static_cast<std::int64_t>(row) * p.key_blocks();
    const int warp = warp_id();
    const int lane = lane_id();

    // The blocks or groups that intersect the queries of any warp.
    const bool has_groups = p.groups != nullptr;
    const int2* const groups =
        has_groups ? p.groups + static_cast<std::int64_t>(row) * p.key_groups() : nullptr;
    const int count = has_groups ? p.key_groups() : p.key_blocks();
    const int rows_begin = first_tile * query_tile_rows;
    const int rows_end = rows_begin + warps * query_tile_rows;
    int begin = INT_MAX;
    int end = 0;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < count; i += threads) {
      const int2 seen = has_groups ? groups[i] : *reinterpret_cast<const int2*>(&blocks[i].begin);
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
    if (has_groups) {
      begin = min(begin, count) * Params::group_blocks;
      end = min(end * Params::group_blocks, p.key_blocks());
    }

    const int tile = first_tile + warp;
    if (tile >= p.query_tiles()) return;
    const KeyRange range = find(p, blocks, begin, end, tile * query_tile_rows);
    if (lane == 0) p.key_ranges[static_cast<std::int64_t>(row) * p.query_tiles() + tile] = range;
  }

 private:
  // Finds the range among blocks [begin, end).
  static __device__ KeyRange find(const Params& p, const KeyBlockQueries* blocks, int begin,
                                  int end, int row_begin) {
    const int row_end = min(row_begin + query_tile_rows, p.seqlen_q);
    int first = INT_MAX;
    int last = -1;
    int2 full = {0, 0};      // the longest range of blocks whose keys all queries see
    int full_begin = begin;  // begin of the current range
    const auto end_full = [&](int at) {
      if (at - full_begin > full.y - full.x) full = {full_begin, at};
      full_begin = at + 1;
    };
    for (int from = begin; from < end; from += 32) {
      const int block = from + lane_id();
      KeyBlockQueries seen{INT_MAX, 0, INT_MAX, 0};
      if (block < end) seen = blocks[block];
      const bool touched = seen.begin < row_end && seen.end > row_begin;
      const unsigned touched_blocks = warp_ballot(touched);
      if (touched_blocks != 0) {
        first = min(first, from + __ffs(static_cast<int>(touched_blocks)) - 1);
        last = from + 31 - __clz(static_cast<int>(touched_blocks));
      }
      unsigned partial = ~warp_ballot(seen.full_begin <= row_begin && seen.full_end >= row_end);
      for (; partial != 0; partial &= partial - 1)
        end_full(from + __ffs(static_cast<int>(partial)) - 1);
    }
    end_full(end);
    if (last < 0) return {0, 0, 0, 0};
    return {first * KeyRange::keys, min((last + 1) * KeyRange::keys, p.seqlen_k),
            full.x * KeyRange::keys, full.y * KeyRange::keys};
  }
};

}  // namespace flash_dmattn::cuda
