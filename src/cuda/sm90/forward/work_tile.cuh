#pragma once

#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/scheduler.cuh"
#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/policy.h"

namespace flash_dmattn::cuda::sm90 {

// A tile of queries of one head and the key tiles that it visits. Persistent blocks take work tiles in the order of
// their numbers, longest first. Key tiles are numbered in the order of visits: partial tiles come first, from the end
// of the keys and then from their beginning. The first tile is always tested.
struct WorkTile {
  int batch;
  int head;
  int kv_head;
  int row;    // first query
  int begin;  // keys [begin, end), or entries [0, end) of a list
  int end;
  int visits;   // number of key tiles; 0 at the end of work
  int partial;  // the first visits, whose ranges are tested
  int tested;  // the first visits, which are partial or have a key whose delayed bias may not count
  int partial_at_end;  // tested visits at the end of the keys

  static int count(const Shape& shape, int rows) {
    return static_cast<int>(QueryTile::count(shape, rows));
  }

  static __device__ WorkTile end_of_work() { return {}; }

  __device__ bool has_keys() const { return end > begin; }
  __device__ bool is_partial(int visit) const { return visit < partial; }

  // The first key of a visit's tile.
  template <int Keys>
  __device__ int first_key(int visit) const {
    const int at_begin = partial - partial_at_end;
    int tile = visits - 1 - visit;
    if (visit >= partial) {
      tile += at_begin;
    } else if (visit >= partial_at_end) {
      tile = visit - partial_at_end;
    }
    return begin + tile * Keys;
  }
};

// The keys [begin, end) of a query tile, consecutive or places of its list. By position and interval, every query sees
// the keys [full_begin, full_end).
struct KeyBounds {
  int begin;
  int end;
  int full_begin;
  int full_end;
};

// The keys whose biases count for the queries of a work tile: for every query those before `all_end`, and for no query
// those from `some_end` on.
struct BiasBounds {
  int all_end;
  int some_end;

  __device__ BiasBounds(const ForwardParams& p, int first_query, int queries)
      : all_end(first_query + 1 - delayed_bias_begin(p.score, p.shape, 0)),
        some_end(all_end + queries - 1) {}
};

// Whether all heads are one section (QueryTile), so that no long tile runs last. One section is 4 % faster with lists,
// 1 to 5 % with intervals, and 8 % for 16 causal heads of 8192 keys. Without causality
// it is 5 % slower, and for 16 heads of 32768 keys 3 %.
__device__ inline bool is_one_section(const ForwardParams& p) {
  constexpr std::int64_t causal_bytes = 96 << 20;  // K and V
  const std::int64_t bytes =
      p.shape.seqlen_k * p.shape.key_bytes() * p.shape.heads_kv * p.shape.batch;
  return p.tile_lists.keys != nullptr || p.key_ranges.data != nullptr ||
         (p.score.causal && bytes <= causal_bytes);
}

// The bounds of the queries of a and b together.
__device__ inline KeyBounds merge(const KeyBounds& a, const KeyBounds& b) {
  return {min(a.begin, b.begin), max(a.end, b.end), max(a.full_begin, b.full_begin),
          min(a.full_end, b.full_end)};
}

// The keys of `rows` queries. With lists or key ranges, these are the keys of the first query's list or range.
__device__ inline KeyBounds key_bounds(const ForwardParams& p, const WorkTile& work, int rows) {
  if (p.tile_lists.keys != nullptr) {
    const std::int64_t list = list_of(p.tile_lists, work);
    return {0, __ldg(p.tile_lists.count + list), 0, __ldg(p.tile_lists.full + list)};
  }
  if (p.key_ranges.data != nullptr) {
    const int4 range = __ldg(reinterpret_cast<const int4*>(
        p.key_ranges.data + work.batch * p.key_ranges.batch + work.kv_head * p.key_ranges.head +
        work.row / query_tile_rows));
    return {range.x, range.y, range.z, range.w};
  }
  const Shape& shape = p.shape;
  const int shift = shape.seqlen_k - shape.seqlen_q;
  const auto visible = [&](int query) {
    return p.score.causal ? max(min(query + shift + 1, shape.seqlen_k), 0) : shape.seqlen_k;
  };
  const int last = min(work.row + rows, shape.seqlen_q) - 1;
  return {0, visible(last), 0, p.score.intervals.data == nullptr ? visible(work.row) : 0};
}

// The place, in the order of lengths with the longest first, of the work tile that is `number` in the order of
// execution. If blocks take two to three work tiles of a triangle, longest first, all end their second tile at the same
// time, and the third adds up to 12 % of the time. The first tiles are therefore the ones that fill a block's share
// together with the longest, and the shortest tiles come last.
__device__ inline int place_by_length(const ForwardParams& p, int count, int number) {
  const int blocks = static_cast<int>(gridDim.x);
  const bool is_triangle = p.score.causal && is_one_section(p) && p.tile_lists.keys == nullptr &&
                           p.key_ranges.data == nullptr;
  if (!is_triangle || count <= 2 * blocks || count >= 3 * blocks) return number;
  const int share = count * count / (2 * blocks);
  const int longer = 2 * count - blocks - share - count / 64;  // tiles longer than the first ones
  if (number < blocks) return number + longer;
  return number < blocks + longer ? number - blocks : number;
}

// Work tile `number`, with `rows` queries of a head, without its keys.
__device__ inline WorkTile get_queries(const ForwardParams& p, const Shape& shape, int rows,
                                       int number) {
  const int count = ceil_div(shape.seqlen_q, rows) * shape.heads_q * shape.batch;
  const QueryTile tile(shape, rows, is_one_section(p), place_by_length(p, count, number));
  WorkTile work{};
  work.batch = tile.batch;
  work.head = tile.head;
  work.kv_head = tile.kv_head;
  work.row = tile.row;
  return work;
}

// Work tile `number`, with Rows queries against tiles of Keys keys.
template <int Rows, int Keys>
__device__ inline WorkTile get_work_tile(const ForwardParams& p, int number) {
  WorkTile work = get_queries(p, p.shape, Rows, number);
  const KeyBounds bounds = key_bounds(p, work, Rows);
  work.begin = bounds.begin;
  work.end = bounds.end;
  const int tiles = max((work.end - work.begin + Keys - 1) / Keys, 1);
  const int at_begin = (bounds.full_begin - work.begin + Keys - 1) / Keys;
  const int at_end = tiles - (bounds.full_end - work.begin) / Keys;
  const bool none_full = bounds.full_end <= bounds.full_begin || at_begin + at_end >= tiles;
  work.visits = tiles;
  work.partial_at_end = none_full ? tiles : max(at_end, at_begin == 0 ? 1 : 0);
  work.partial = none_full ? tiles : work.partial_at_end + at_begin;
  work.tested = work.partial;
  if (p.score.bias_delay != 0) {
    // A list does not tell where its recent keys are.
    const int old = p.tile_lists.keys == nullptr
                        ? (BiasBounds(p, work.row, Rows).all_end - work.begin) / Keys
                        : 0;
    work.tested += max(tiles - work.partial - max(old - at_begin, 0), 0);
  }
  return work;
}

}  // namespace flash_dmattn::cuda::sm90
