#pragma once

#include <type_traits>

#include "cuda/hopper/panel_tile.cuh"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/primitives/semaphore.cuh"
#include "cuda/sm90/backward/work/work.cuh"

namespace flash_dmattn::cuda::sm90 {

// The values of the rows of a query tile. Every score of a row is initialized with `score`, which is -lse / scale, or
// -inf for rows that do not exist or have no P. If lse is large (lse_is_large), `score` is 0, and -lse in units of log 2
// is the sum of `high` and `low`, which are 0 otherwise. With a dense mask or bias `score` is never 0 for that reason, and
// `low` is what rounding it leaves.
template <int Rows>
struct RowStats {
  float score[Rows];
  float delta[Rows];
  float high[Rows];
  __half low[Rows];

  // `low` of two neighbouring rows.
  __device__ float2 two_low(int row) const {
    return __half22float2(*reinterpret_cast<const __half2*>(low + row));
  }
};

// The keys in a block's slots, and then those in the slots of the other block of a pair, for the current query tile and
// the next.
template <bool Exists, int Keys>
struct SlotStorage {
  alignas(16) KeyRecord records[2][Keys];
  // The next key of each slot, by arrival, with its record and its successor, for the later of the two tiles.
  int successor[Keys];
  int after_successor[Keys];
  alignas(16) KeyRecord coming[Keys];
  Pipeline<2> pipeline;  // one use per query tile
};
template <int Keys>
struct SlotStorage<false, Keys> {};

// A block's neighbouring keys, with their biases for the current head.
template <bool Exists, int Keys>
struct BlockStorage {
  alignas(16) KeyRecord records[Keys];  // find_queries stores those of the first head
};
template <int Keys>
struct BlockStorage<false, Keys> {};

// The storage for a dense mask or bias.
template <int Tiles>
struct ScoreTilePipelines {
  LoadedVisit visits[BackwardPolicy::stages];  // loaded with q
  // The ranges of the block's keys and of each consumer warp's keys (KeyBlock), for which the loop has no registers.
  KeyInterval ranges[dense_block_keys];
  KeyInterval full_queries[4 * BackwardPolicy::warpgroups];
  Pipeline<Tiles> computed;  // passes dS from the consumers to the writer of dbias
  // Zeros for the tiles of dbias that no visit computes, with DenseDbias::by_tma.
  alignas(128) std::byte zeros[PanelTile<PackedMask::side, panel_columns>::bytes];
};

template <DenseAccess Access, int Tiles>
struct DenseStorage {};
// A tile of dS is first a tile of biases. A warp reads the biases of its 16 keys and later overwrites them with dS.
template <int Tiles>
struct DenseStorage<DenseAccess::tiles, Tiles> : ScoreTilePipelines<Tiles> {
  static constexpr int words = dense_block_keys / PackedMask::side;

  // The bits of 64 keys for each of 64 queries.
  alignas(128) std::uint64_t bits[Tiles][words][PackedMask::side];
  Pipeline<Tiles> loaded;  // passes bits and biases from the loader to the consumers
};
template <int Tiles>
struct DenseStorage<DenseAccess::elements, Tiles> : ScoreTilePipelines<Tiles> {};

// The copies that one of two blocks has of the other's (BackwardPolicy::cluster): keys, in the columns of dq that this
// block makes, and dS.
template <bool Exists, int Keys, int Rows, int Columns, int Tiles>
struct PartnerStorage {
  using KeyTile = PanelTile<Keys, Columns>;

  alignas(1024) std::byte k[KeyTile::bytes];
  alignas(1024) std::byte ds[Tiles][PanelTile<Keys, Rows>::bytes];
};
template <int Keys, int Rows, int Columns, int Tiles>
struct PartnerStorage<false, Keys, Rows, Columns, Tiles> {};

template <int D, int Dv, BackwardVariant Variant>
struct BackwardStorage {
  static constexpr BackwardPolicy policy = backward_policy(D, Dv, Variant);
  using KeyTile = PanelTile<policy.keys, D>;
  using ValueTile = PanelTile<policy.keys, Dv>;
  using QueryTile = PanelTile<policy.rows, D>;
  using DoutTile = PanelTile<policy.rows, Dv>;
  // dS has keys as rows, but with a dense mask or bias it has queries as rows, as in memory.
  using ScoreTile = std::conditional_t<Variant.has_dense(), PanelTile<policy.rows, policy.keys>,
                                       PanelTile<policy.keys, policy.rows>>;
  using Stats = RowStats<policy.rows>;
  static_assert(sizeof(Stats) == policy.rows * row_stats_bytes, "as plan.cu takes memory for it");
  using Partner = PartnerStorage<policy.paired(), policy.keys, policy.rows,
                                 policy.takes_turns(D) ? D : D / 2, policy.score_tiles>;
  // The warp that adds dq to memory orders its additions.
  static constexpr int order_barrier = 1;
  using Semaphore = OrderSemaphore<true, warp_size, order_barrier>;

  alignas(1024) std::byte k[KeyTile::bytes];
  alignas(1024) std::byte v[ValueTile::bytes];
  alignas(1024) std::byte q[policy.stages][QueryTile::bytes];
  alignas(1024) std::byte dout[policy.dout_stages][DoutTile::bytes];
  alignas(1024) std::byte ds[policy.score_tiles][ScoreTile::bytes];
  Partner partner;
  alignas(1024) float dq[policy.dq_tiles(D)][64 * policy.dq_part_columns(D)];
  alignas(128) Stats stats[policy.stages];
  Pipeline<1> key_pipeline;
  Pipeline<policy.stages> q_pipeline;  // q and its stats
  Pipeline<policy.dout_stages> dout_pipeline;
  Pipeline<policy.score_tiles> ds_pipeline;  // with ConsumerSplit::roles or late_dq
  Pipeline<policy.score_tiles>
      received;  // the partner's dS; ds_pipeline of the partner waits until it is read
  typename Semaphore::Storage semaphore;
  int work_number;  // number of the work in the order of additions
  int bounds[2];    // queries that see some key of the block
  // A block of neighbouring keys uses one; parts of chains of slots alternate between both.
  BackwardWork work[2];
  BlockStorage<Variant.has_info() && !Variant.has_slots() && !Variant.has_dense(), policy.keys>
      block;
  SlotStorage<Variant.has_slots(), policy.work_keys()> slots;
  DenseStorage<Variant.dense, policy.score_tiles> dense;
};

}  // namespace flash_dmattn::cuda::sm90
