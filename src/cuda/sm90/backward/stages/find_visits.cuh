#pragma once

#include "cuda/attention/scheduler.cuh"
#include "cuda/attention/tile_states.cuh"
#include "cuda/primitives/warp.cuh"
#include "cuda/sm90/backward/work/work.cuh"

namespace flash_dmattn::cuda::sm90 {

// Computes QueryVisitLists, which list for each block of keys the query tiles that intersect the ranges of its keys and
// are not empty in the packed mask. All warp roles of a block iterate over the same list, without communication.
struct FindVisits {
  using Params = BackwardKernelParams;
  static constexpr int threads = 256;
  static constexpr int warps = threads / warp_size;
  static constexpr int min_blocks = 1;
  static constexpr int rows = PackedMask::side;

  struct SharedStorage {
    int bounds[2];
    int found[warps];
  };

  static long blocks(const Params& p) { return KeyTile::count(p.backward.shape, dense_block_keys); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const KeyTile keys(p.backward.shape, dense_block_keys, true, static_cast<int>(blockIdx.x));
    constexpr BackwardVariant with_ranges{.placement = KeyPlacement::block_key_info};
    const int2 queries = find_queries<with_ranges, dense_block_keys>(p, keys, shared.bounds,
                                                                     [](int, const KeyRecord&) {});
    const int first_tile = queries.x / rows;
    const int tiles = max(ceil_div(queries.y, rows) - first_tile, 0);
    const int group = p.backward.shape.heads_q / p.backward.shape.heads_kv;
    const int list = QueryVisitLists::list(p.backward.shape, keys.batch, keys.kv_head, keys.key);
    QueryVisit* const to = p.visits.visits + std::int64_t{list} * p.visits.capacity;
    // All heads of a tile then share one mask and one bias, and all are visited if one is.
    const bool shared_dense = p.visits.heads_together && p.backward.score.packed_mask.head_q == 0 &&
                              p.backward.score.bias.head_q == 0;
    const int candidates = tiles * group;
    int count = 0;
    for (int first = 0; first < candidates; first += threads) {
      const int i = first + static_cast<int>(threadIdx.x);
      const bool together = p.visits.heads_together;
      const int tile = first_tile + (together ? i / group : i % tiles);
      const int head = keys.kv_head * group + (together ? i % group : i / tiles);
      const std::uint32_t state = i < candidates ? state_of(p, keys, head, tile) : 0u;
      const bool some = (state & PackedMask::some) != 0;
      const unsigned lanes = warp_ballot(some);
      if (lane_id() == 0) shared.found[warp_id()] = __popc(lanes);
      __syncthreads();
      int before = count + count_before(lanes, lane_id());
      for (int w = 0; w < warps; ++w) {
        if (w < warp_id()) before += shared.found[w];
        count += shared.found[w];
      }
      if (some) {
        // Neighbouring lanes have the two heads of a tile.
        const bool both = p.dense_dbias.sums_heads && (lanes >> (lane_id() ^ 1) & 1) != 0;
        to[before] = {.tile = tile,
                      .head = static_cast<std::uint32_t>(head),
                      .masked = (state & PackedMask::all) == 0,
                      .first_of_two = both && lane_id() % 2 == 0,
                      .second_of_two = both && lane_id() % 2 == 1,
                      .same_dense = shared_dense && i % group != 0};
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) p.visits.count[list] = count;
  }

 private:
  static __device__ std::uint32_t state_of(const Params& p, const KeyTile& keys, int head,
                                           int tile) {
    const PackedMask& mask = p.backward.score.packed_mask;
    if (mask.states == nullptr) return PackedMask::some | PackedMask::all;
    const std::int64_t matrix = mask.matrix(keys.batch, head, keys.kv_head);
    const std::int64_t row_tile = matrix * ceil_div(p.backward.shape.seqlen_q, rows) + tile;
    return state_of_keys(mask, row_tile, keys.key / PackedMask::side);
  }
};

}  // namespace flash_dmattn::cuda::sm90
