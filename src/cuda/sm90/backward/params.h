#pragma once

#include <cuda.h>

#include "cuda/attention/params.h"
#include "cuda/primitives/integers.h"
#include "cuda/schedule/slots/key_slots.h"
#include "cuda/sm90/backward/key_block_order.h"
#include "cuda/sm90/backward/policy.h"
#include "cuda/sm90/key_info.h"
#include "cuda/sm90/slots/parts.h"

namespace flash_dmattn::cuda::sm90 {

// The queries [first, last) that see a key, and its bias in units of the accumulator that it initializes; in a call with
// a large lse (BackwardVariant::large_lse), the caller's bias. The bias is -inf if mask or bias hide the key.
struct alignas(16) KeyRecord {
  int first;
  int last;
  int key;
  float bias;
};

// Keys in slots. A key's rows of dk and dv are stored when it leaves its slot. If a cut divides a key's lifetime, its
// rows are first stored as fp32 parts. Every part of a chain has two of these for each slot, for the key that it begins
// with and for the key that it ends with.
struct SlotParams {
  KeySlots slots;
  std::int64_t row_batch = 0;  // rows of the slots, from one batch element or head to the next
  std::int64_t row_head = 0;
  int work_slots = 0;     // BackwardPolicy::work_keys
  int segment_tiles = 0;  // query tiles of a unit
  SlotPlanShape plan_shape;
  SlotPlan plan;
  int* plan_scratch = nullptr;   // [plan_shape.scratch()]
  KeyRecord* records = nullptr;  // [B, Hkv, Sk] by arrival
  float* part_sums =
      nullptr;  // [cut parts, 2, work_slots, D + Dv]: dk, dv in the order of accumulators
  float* part_dbias = nullptr;  // [cut parts, 2, work_slots]

  __device__ std::int64_t row(int batch, int kv_head) const {
    return batch * row_batch + kv_head * row_head;
  }
  // The first arrival of a slot in use; any arrival if the intervals break their bound.
  __device__ int first_arrival(int batch, int kv_head, int slot) const {
    const std::int64_t first_segment =
        row(batch, kv_head) * slots.shape.segments * slots.shape.slots;
    return max(slots.starts[first_segment + slot], 0);
  }
};

// A query tile that a block of keys visits, with a dense mask or bias.
struct alignas(8) QueryVisit {
  int tile;
  std::uint32_t head : 28;
  std::uint32_t masked : 1;  // the packed mask hides some element
  // For two heads whose dS is summed (DenseDbias::sums_heads): the next visit, or the previous visit, has the other
  // head.
  std::uint32_t first_of_two : 1;
  std::uint32_t second_of_two : 1;
  std::uint32_t same_dense : 1;  // mask and bias equal those of the previous visit
};

// The query tiles that each block of keys visits, in all heads of the group (stages/find_visits.cuh): one head after another,
// or the heads of a tile together.
struct QueryVisitLists {
  QueryVisit* visits = nullptr;  // [B, Hkv, key blocks, capacity]
  int* count = nullptr;          // [B, Hkv, key blocks]
  int capacity = 0;
  bool heads_together = false;

  __host__ __device__ static int key_blocks(const Shape& shape) {
    return ceil_div(shape.seqlen_k, dense_block_keys);
  }
  __device__ static int list(const Shape& shape, int batch, int kv_head, int key) {
    return (batch * shape.heads_kv + kv_head) * key_blocks(shape) + key / dense_block_keys;
  }
};

// The gradient of a dense bias.
struct DenseDbias {
  // Whether two heads of a group share the elements, of which a block stores the sum.
  bool sums_heads = false;
  // Whether the main loop stores zeros for the tiles that no block computes.
  bool clears = false;
  // Whether the TMA unit stores tiles.
  bool by_tma = false;
};

// RowStats of a row, in memory.
inline constexpr int row_stats_bytes = 3 * sizeof(float) + 2;

// The parameters of the main loop. Its tensors may be copies, as q has the sign of the scale.
struct BackwardKernelParams {
  // Tensor maps are aligned to 64 bytes, because the TMA unit reads them.
  CUtensorMap q_map;
  CUtensorMap dout_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  CUtensorMap bias_map;   // a dense bias
  CUtensorMap dbias_map;  // its gradient, with DenseDbias::by_tma
  BackwardParams backward;
  float bias_factor = 0;  // converts a bias to the unit of the accumulators that begin with it
  float dq_scale = 0;
  KeyInfo info;
  QueryVisitLists visits;
  DenseDbias dense_dbias;
  float* row_stats = nullptr;  // [B, Hq, query tiles] RowStats
  float* dq_accum = nullptr;   // [B, Hq, query tiles] DqAccumLayout; null if not wanted
  OrderSemaphores order;       // order of the additions to dq_accum
  SlotParams slots;
  KeyBlockOrder blocks;  // of neighbouring keys
};

}  // namespace flash_dmattn::cuda::sm90
