#pragma once

#include "cuda/params.h"

namespace flash_dmattn::cuda {

// Whether blocks that start together read the same keys, and later tiles of queries may have more of
// them than earlier ones: with causality or intervals, without lists.
template <class Params>
__device__ inline bool walks_neighbours(const Params& p) {
  return p.plan.keys == nullptr && (p.score.causal || p.runs.data != nullptr);
}

// The (batch, head, query tile) of a block. Rows of k and v are shared through the L2: the heads of
// a group are neighbours, and blocks go through as many kv heads at a time as the L2 can hold.
// Where tiles walk neighbours the long ones of all heads come first instead, in one section: the
// blocks that run together then read the same keys at the same time, and no long tile is left for the
// end (12 % of the time of 16 heads of 8192 queries). Blocks that take
// turns are in one section too: those of a head follow each other, so that it takes many heads.
struct QueryTile {
  static constexpr std::int64_t section_bytes = 24 << 20;  // of k and v; half of an H200's L2

  int batch;
  int head;
  int kv_head;
  int row;  // first query
  // In one section: the work just before this one that shares its keys, or its rows but another kv
  // head; -1: none.
  int before_of_keys;
  int before_of_rows;

  static long count(const Shape& shape, int rows) {
    const long tiles = (shape.seqlen_q + rows - 1) / rows;
    return tiles * shape.heads_q * shape.batch;
  }

  __device__ QueryTile(const Shape& shape, int rows, bool one_section, int work) {
    const int group = shape.heads_q / shape.heads_kv;
    const int tiles = (shape.seqlen_q + rows - 1) / rows;
    const int pairs = shape.batch * shape.heads_kv;  // (batch, kv head)
    const std::int64_t pair_bytes = 4 * static_cast<std::int64_t>(shape.seqlen_k) * shape.head_dim;
    const std::int64_t fitting = section_bytes / max(pair_bytes, std::int64_t{1});
    const int section = one_section || fitting > pairs ? pairs : max(1, static_cast<int>(fitting));

    const int number = work;
    const int first = work / (section * group * tiles) * section;
    const int size = min(section, pairs - first);
    work -= first * group * tiles;
    const int member = work % group;
    work /= group;
    const int pair = first + work % size;
    const int turn = work / size;
    row = (tiles - 1 - turn) * rows;
    before_of_keys = member > 0 ? number - 1 : turn > 0 ? number - size * group + group - 1 : -1;
    before_of_rows = member == 0 && pair > 0 ? number - 1 : -1;
    kv_head = pair % shape.heads_kv;
    head = kv_head * group + member;
    batch = pair / shape.heads_kv;
  }
};

// The (batch, kv head, key tile) of a block that owns keys. What the blocks of a head share is q,
// dout and the sums of dq of its group; blocks go through as many kv heads at a time as the L2 can
// hold. Among these the first tiles come first, so that with a causal mask the long ones do.
struct KeyTile {
  static constexpr std::int64_t section_bytes = 32 << 20;

  int batch;
  int kv_head;
  int key;     // first key
  int before;  // the work just before this one of the same kv head; -1: none

  static long count(const Shape& shape, int keys) {
    const long tiles = (shape.seqlen_k + keys - 1) / keys;
    return tiles * shape.heads_kv * shape.batch;
  }

  // `one_section`: of blocks that take turns, as above.
  __device__ KeyTile(const Shape& shape, int keys, bool one_section, int work) {
    const int group = shape.heads_q / shape.heads_kv;
    const int tiles = (shape.seqlen_k + keys - 1) / keys;
    const int pairs = shape.batch * shape.heads_kv;  // (batch, kv head)
    const std::int64_t pair_bytes =
        8 * static_cast<std::int64_t>(group) * shape.seqlen_q * shape.head_dim;
    const int fitting = static_cast<int>(section_bytes / max(pair_bytes, std::int64_t{1}));
    const int section = one_section ? pairs : max(1, min(pairs, fitting));

    const int number = work;
    const int first = work / (section * tiles) * section;
    const int size = min(section, pairs - first);
    work -= first * tiles;
    const int pair = first + work % size;
    key = work / size * keys;
    before = key > 0 ? number - size : -1;
    kv_head = pair % shape.heads_kv;
    batch = pair / shape.heads_kv;
  }
};

}  // namespace flash_dmattn::cuda
