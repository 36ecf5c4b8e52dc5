#pragma once

#include "cuda/attention/scheduler.cuh"
#include "cuda/attention/tile_states.cuh"
#include "cuda/primitives/block.cuh"
#include "cuda/sm90/backward/work/work.cuh"

namespace flash_dmattn::cuda::sm90 {

// Computes QueryVisitLists, which list for each block of keys the query tiles that intersect the ranges of its keys and
// are not empty in the packed mask. All warp roles of a block iterate over the same list, without communication.
struct FindVisits {
  using Params = BackwardKernelParams;
  static constexpr int threads = 256;
  static constexpr int min_blocks = 1;
  static constexpr int rows = PackedMask::side;
  using Numbers = BlockNumbers<threads>;

  struct SharedStorage {
    int bounds[2];
    Numbers::Storage numbers;
  };

  static long blocks(const Params& p) { return KeyTile::count(p.backward.shape, dense_block_keys); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const KeyTile keys(p.backward.shape, dense_block_keys, true, static_cast<int>(blockIdx.x));
    constexpr BackwardVariant with_ranges{.placement = KeyPlacement::block_key_info};
    const int2 queries = find_queries<with_ranges, dense_block_keys>(p, keys, shared.bounds,
                                                                     [](int, const KeyRecord&) {});
    const int first_tile = queries.x / rows;
    const int tiles = max(ceil_div(queries.y, rows) - first_tile, 0);
    const int group = p.backward.shape.group_heads();
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
      int total;
      const int place = count + Numbers::number(shared.numbers, some, total);
      count += total;
      // Neighbouring lanes have the two heads of a tile.
      const bool both = shuffle_xor(some, 1) && p.dense_dbias.sums_heads;
      if (some) {
        to[place] = {.tile = tile,
                     .head = static_cast<std::uint32_t>(head),
                     .masked = (state & PackedMask::all) == 0,
                     .first_of_two = both && lane_id() % 2 == 0,
                     .second_of_two = both && lane_id() % 2 == 1,
                     .same_dense = shared_dense && i % group != 0};
      }
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
