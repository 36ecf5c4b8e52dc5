#pragma once

#include "cuda/common/scheduler.cuh"
#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/backward_policy.h"
#include "cuda/sm90/ptx.cuh"

namespace flash_dmattn::cuda::sm90 {

// A block of keys, or of slots, of a kv head and the query tiles that it visits.
struct BackwardWork {
  int batch;
  int kv_head;
  int key;  // first key or slot
  int tile_begin;
  int tile_end;
  int part = 0;      // SlotPart::id
  int position = 0;  // SlotPartition::position

  __device__ bool has_tiles() const { return tile_end > tile_begin; }
};

// The query tiles of a work, of all heads of the group: with neighbouring keys one head after the other, because
// heads may differ in mask and bias; with slots the heads of a tile together, because then keys come and go.
template <KeyPlacement Placement>
class QueryVisits {
 public:
  int tile;
  int head;

  __device__ QueryVisits(const Shape& shape, const BackwardWork& work)
      : tile(work.tile_begin),
        head(work.kv_head * (shape.heads_q / shape.heads_kv)),
        tile_begin_(work.tile_begin),
        tile_end_(work.tile_end),
        head_begin_(head),
        group_(shape.heads_q / shape.heads_kv),
        left_(group_ * (work.tile_end - work.tile_begin)) {}

  __device__ bool has() const { return left_ > 0; }
  __device__ bool is_last() const { return left_ == 1; }
  __device__ bool is_last_of_head() const { return tile + 1 == tile_end_; }

  __device__ bool is_first_head() const { return head == head_begin_; }
  __device__ bool is_last_head() const { return head + 1 == head_begin_ + group_; }

  __device__ void advance() {
    --left_;
    if constexpr (Placement == KeyPlacement::slots) {
      if (is_last_head()) {
        ++tile;
        head = head_begin_;
      } else {
        ++head;
      }
    } else if (++tile == tile_end_) {
      tile = tile_begin_;
      ++head;
    }
  }

 private:
  int tile_begin_;
  int tile_end_;
  int head_begin_;
  int group_;
  int left_;
};

// Of the arrays whose elements belong to the query tiles of heads.
__device__ inline std::int64_t tile_index(const Shape& shape, int rows, int batch, int head,
                                          int tile) {
  return (static_cast<std::int64_t>(batch) * shape.heads_q + head) *
             ((shape.seqlen_q + rows - 1) / rows) +
         tile;
}

// The query tiles of a part, from the first that sees a key of its slots.
__device__ inline BackwardWork work_of(const BackwardKernelParams& p, const SlotPart& part) {
  const SlotParams& slots = p.slots;
  const Shape& shape = p.backward.shape;
  const int head_index = part.chain / slots.row_blocks;
  const int slot = part.chain % slots.row_blocks * SlotParams::block_slots;
  BackwardWork work;
  work.batch = head_index / shape.heads_kv;
  work.kv_head = head_index % shape.heads_kv;
  work.key = slot;
  work.part = part.id;
  work.position = slots.partition.position(part, slots.row_blocks);
  const std::int64_t row = work.batch * slots.row_batch + work.kv_head * slots.row_head;
  const int tiles = ceil_div(shape.seqlen_q, slot_tile_rows);
  work.tile_begin = part.unit_begin * slots.segment_tiles;
  work.tile_end = min(part.unit_end * slots.segment_tiles, tiles);
  // Keys arrive in the order of slots. Where additions have an order each block takes its turn at every tile.
  if (p.order.published != nullptr) return work;
  if (slot >= slots.slots.count[row]) {
    work.tile_begin = work.tile_end;
  } else {
    const std::int64_t first = std::int64_t{head_index} * shape.seqlen_k + slot;
    work.tile_begin = max(work.tile_begin, slots.records[first].first / slot_tile_rows);
  }
  return work;
}

// The queries that see some key of a block of neighbouring keys, [begin, end). By all threads of the block.
template <KeyPlacement Placement>
__device__ inline int2 find_queries(const BackwardKernelParams& p, const KeyTile& tile,
                                    int (&shared_bounds)[2]) {
  const Shape& shape = p.backward.shape;
  if constexpr (Placement == KeyPlacement::block) {
    const int first =
        p.backward.score.causal ? max(tile.key - (shape.seqlen_k - shape.seqlen_q), 0) : 0;
    return {first, shape.seqlen_q};
  } else {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) shared_bounds[0] = shape.seqlen_q;
    if (thread == 0) shared_bounds[1] = 0;
    __syncthreads();
    if (thread < BackwardPolicy::keys) {
      const KeyInterval range = p.info.ranges[tile.batch * p.info.range_batch +
                                              tile.kv_head * p.info.range_head + tile.key + thread];
      const bool seen = range.first < range.last;
      const int begin = warp_min(seen ? range.first : shape.seqlen_q);
      const int end = warp_max(seen ? range.last : 0);
      if (lane_id() == 0) {
        atomicMin(&shared_bounds[0], begin);
        atomicMax(&shared_bounds[1], end);
      }
    }
    __syncthreads();
    return {shared_bounds[0], shared_bounds[1]};
  }
}

}  // namespace flash_dmattn::cuda::sm90
