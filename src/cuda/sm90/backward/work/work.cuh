#pragma once

#include "cuda/attention/scheduler.cuh"
#include "cuda/hopper/ptx.cuh"
#include "cuda/sm90/backward/work/query_visits.cuh"
#include "cuda/sm90/prepare_key_info.cuh"

namespace flash_dmattn::cuda::sm90 {

// The work of a part: its query tiles from the first tile that sees a key of its slots.
__device__ inline BackwardWork work_of(const BackwardKernelParams& p, const SlotPart& part) {
  const SlotParams& slots = p.slots;
  const Shape& shape = p.backward.shape;
  BackwardWork work;
  work.batch = part.head / shape.heads_kv;
  work.kv_head = part.head % shape.heads_kv;
  work.key = part.block * slots.work_slots;
  work.part = part.id;
  work.position = part.position;
  const int tiles = ceil_div(shape.seqlen_q, slot_tile_rows);
  work.tile_begin = part.unit_begin * slots.segment_tiles;
  work.tile_end = min(part.unit_end * slots.segment_tiles, tiles);
  // Slots begin in the order of their numbers. With ordered additions each block adds to every tile in order.
  if (p.order.published != nullptr) return work;
  const int first = slots.first_arrival(work.batch, work.kv_head, work.key);
  work.tile_begin =
      max(work.tile_begin,
          slots.records[std::int64_t{part.head} * shape.seqlen_k + first].first / slot_tile_rows);
  return work;
}

// The record of a key, with the bias for the first head of the group.
__device__ inline KeyRecord first_record(const Shape& shape, const KeyInfo& info, int batch,
                                         int kv_head, int key) {
  const int head = kv_head * shape.group_heads();
  const KeyInterval seen = info.ranges_of(batch, kv_head)[key];
  return {seen.first, seen.last, key, info.biases_of(batch, head, kv_head)[key]};
}

// The caller's bias of a record for the first head of the group, or for query head `head`, which a record has in a call
// with a large lse.
template <class T>
__device__ inline float unscaled_bias(const BackwardParams& p, int batch, int kv_head,
                                      const KeyRecord& record, int head = -1) {
  if (record.bias == negative_infinity) return record.bias;
  const QueryHead own{batch, head < 0 ? kv_head * p.shape.group_heads() : head, kv_head};
  return key_bias<T>(p.shape, p.score, own, record.key, 1, record.bias);
}

// Finds the queries [begin, end) that see some key of a block of `Keys` neighbouring keys. Called by all threads of the
// block. store(i, record) is called for key tile.key + i.
template <BackwardVariant Variant, int Keys, class Store>
__device__ inline int2 find_queries(const BackwardKernelParams& p, const KeyTile& tile,
                                    int (&shared_bounds)[2], const Store& store) {
  const Shape& shape = p.backward.shape;
  if constexpr (!Variant.has_info()) {
    const int first =
        p.backward.score.causal ? max(tile.key - (shape.seqlen_k - shape.seqlen_q), 0) : 0;
    return {first, shape.seqlen_q};
  } else {
    const int thread = static_cast<int>(threadIdx.x);
    const bool has_key = thread < Keys;
    KeyRecord record{};
    if (has_key) record = first_record(shape, p.info, tile.batch, tile.kv_head, tile.key + thread);
    if (thread == 0) shared_bounds[0] = shape.seqlen_q;
    if (thread == 0) shared_bounds[1] = 0;
    __syncthreads();
    if (has_key) {
      store(thread, record);
      const bool seen = record.first < record.last;
      const int begin = warp_min(seen ? record.first : shape.seqlen_q);
      const int end = warp_max(seen ? record.last : 0);
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
