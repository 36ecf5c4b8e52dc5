#pragma once

#include "cuda/common/semaphore.cuh"
#include "cuda/sm90/backward_work.cuh"
#include "cuda/sm90/panel_tile.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace flash_dmattn::cuda::sm90 {

// Of the rows of a query tile. Every score of a row begins with `score`: -lse / scale, or -inf for rows that do not
// exist or have no P.
template <int Rows>
struct RowStats {
  float score[Rows];
  float delta[Rows];
};

// Who lives in a block's slots, for the current query tile and the next.
template <bool Exists>
struct SlotStorage {
  alignas(16) SlotRecord records[2][SlotParams::block_slots];
  int successor[SlotParams::block_slots];  // by arrival; of the later of the two
  Pipeline<2> pipeline;                    // of query tiles
};
template <>
struct SlotStorage<false> {};

template <int D, KeyPlacement Placement>
struct BackwardStorage {
  static constexpr BackwardPolicy policy = backward_policy(D, Placement);
  using KeyTile = PanelTile<policy.keys, D>;
  using QueryTile = PanelTile<policy.rows, D>;
  using ScoreTile = PanelTile<policy.keys, policy.rows>;
  using Stats = RowStats<policy.rows>;
  // The warp that adds dq to memory orders its additions.
  static constexpr int order_barrier = 1;
  using Semaphore = OrderSemaphore<true, warp_size, order_barrier>;

  alignas(1024) std::byte k[KeyTile::bytes];
  alignas(1024) std::byte v[KeyTile::bytes];
  alignas(1024) std::byte q[policy.stages][QueryTile::bytes];
  alignas(1024) std::byte dout[policy.stages][QueryTile::bytes];
  alignas(1024) std::byte ds[2][ScoreTile::bytes];
  alignas(1024) float dq[policy.rows * D];
  alignas(128) Stats stats[policy.stages];
  Pipeline<1> key_pipeline;
  Pipeline<policy.stages> q_pipeline;  // q and its stats
  Pipeline<policy.stages> dout_pipeline;
  typename Semaphore::Storage semaphore;
  int order;      // the block's number in the order of additions
  int bounds[2];  // queries that see some key of the block
  // Of a block of neighbouring keys one; parts of chains of slots take turns.
  BackwardWork work[2];
  SlotStorage<Placement == KeyPlacement::slots> slots;
};

}  // namespace flash_dmattn::cuda::sm90
