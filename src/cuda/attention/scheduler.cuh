#pragma once

#include "cuda/attention/params.h"
#include "cuda/primitives/integers.h"

// Tile schedulers, which map a block to its tile.
namespace flash_dmattn::cuda {

// Whether neighbouring query tiles visit neighbouring keys, and later tiles may have more keys than earlier tiles. This
// is the case with causality or intervals, without tile lists.
template <class Params>
__device__ inline bool neighbours_share_keys(const Params& p) {
  return p.tile_lists.keys == nullptr && (p.score.causal || p.key_ranges.data != nullptr);
}

// The (batch, head, query tile) of a block. Blocks share rows of k and v through the L2: the heads of a group are
// adjacent, and blocks iterate over sections of as many kv heads as fit into the L2. Where neighbouring tiles share
// keys, all heads are one section instead, longest tiles first. Blocks that run together then read the same keys, and
// no long tile runs last (12 % of the time of 16 heads of 8192 queries). Blocks that add in a fixed order are one
// section, too, because blocks of a head wait for each other, so that many heads must be in flight.
struct QueryTile {
  static constexpr std::int64_t section_bytes = 24 << 20;  // k and v; half of an H200's L2

  int batch;
  int head;
  int kv_head;
  int row;  // first query
  // Within one section, the order indices of the preceding work that shares the keys of this work, or its rows with
  // another kv head; -1 if there is none.
  int before_of_keys;
  int before_of_rows;

  static long count(const Shape& shape, int rows) {
    const long tiles = ceil_div(shape.seqlen_q, rows);
    return tiles * shape.heads_q * shape.batch;
  }

  __device__ QueryTile(const Shape& shape, int rows, bool one_section, int work) {
    const int group = shape.group_heads();
    const int tiles = ceil_div(shape.seqlen_q, rows);
    const int kv_heads = shape.batch * shape.heads_kv;  // over all batch elements
    const std::int64_t head_bytes = shape.seqlen_k * shape.key_bytes();
    const std::int64_t fitting = section_bytes / max(head_bytes, std::int64_t{1});
    const int section =
        one_section || fitting > kv_heads ? kv_heads : max(1, static_cast<int>(fitting));

    const int order_index = work;
    const int first = work / (section * group * tiles) * section;
    const int size = min(section, kv_heads - first);
    work -= first * group * tiles;
    const int member = work % group;
    work /= group;
    const int unit = first + work % size;  // (batch, kv head)
    const int later_tiles = work / size;
    row = (tiles - 1 - later_tiles) * rows;
    before_of_keys = member > 0        ? order_index - 1
                     : later_tiles > 0 ? order_index - size * group + group - 1
                                       : -1;
    before_of_rows = member == 0 && unit > 0 ? order_index - 1 : -1;
    kv_head = unit % shape.heads_kv;
    head = kv_head * group + member;
    batch = unit / shape.heads_kv;
  }
};

// The (batch, kv head, key tile) of a block that owns keys. The blocks of a head share q, dout and dq_accum of its
// group through the L2, in sections of `section` kv heads. Within a section the first tiles, which are the longest
// under causality, run first.
struct KeyTile {
  static constexpr std::int64_t section_bytes = 32 << 20;  // q, dout and dq_accum

  int batch;
  int kv_head;
  int key;     // first key
  int before;  // order index of the preceding work of the same kv head; -1 if there is none

  static long count(const Shape& shape, int keys) {
    const long tiles = ceil_div(shape.seqlen_k, keys);
    return tiles * shape.heads_kv * shape.batch;
  }

  // The number of kv heads over all batch elements. Blocks that wait for each other use it as the section, because many
  // heads must be in flight.
  static __host__ __device__ int all_heads(const Shape& shape) {
    return shape.batch * shape.heads_kv;
  }
  // The number of kv heads that fit into the L2; fewer, if that makes all sections equal: a small last section would leave
  // multiprocessors idle.
  static __host__ __device__ int heads_of_l2(const Shape& shape) {
    const int all = all_heads(shape);
    const int row_bytes = 6 * shape.head_dim + 2 * shape.value_dim;
    const std::int64_t bytes =
        static_cast<std::int64_t>(shape.batch) * shape.heads_q * shape.seqlen_q * row_bytes;
    if (bytes <= section_bytes) return all;
    const auto fitting = static_cast<int>(section_bytes * all / bytes);
    for (int heads = fitting; heads > fitting / 2; --heads)
      if (all % heads == 0) return heads;
    return fitting > 0 ? fitting : 1;
  }

  __device__ KeyTile(const Shape& shape, int keys, int section, int work) {
    const int tiles = ceil_div(shape.seqlen_k, keys);
    const int kv_heads = all_heads(shape);

    const int order_index = work;
    const int first = work / (section * tiles) * section;
    const int size = min(section, kv_heads - first);
    work -= first * tiles;
    const int unit = first + work % size;  // (batch, kv head)
    key = work / size * keys;
    before = key > 0 ? order_index - size : -1;
    kv_head = unit % shape.heads_kv;
    batch = unit / shape.heads_kv;
  }
};

}  // namespace flash_dmattn::cuda
