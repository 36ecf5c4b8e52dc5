#pragma once

#include <cuda.h>

#include "cuda/params.h"
#include "cuda/selection/key_slots.h"
#include "cuda/sm90/key_info.h"
#include "cuda/sm90/slot_parts.h"

namespace flash_dmattn::cuda::sm90 {

// A key that lives in a slot: the queries [first, last) that see it, and its bias in units of the accumulator that
// begins with it; -inf where mask or bias hide the key.
struct alignas(16) SlotRecord {
  int first;
  int last;
  int key;
  float bias;
};

// Keys in slots. A key's rows of dk and dv are stored when it leaves; those of a key that a cut divides are fp32
// parts first, of which every part of a chain has two for each slot: of the key that it begins with and of the one
// that it ends with.
struct SlotParams {
  static constexpr int block_slots = 128;
  static constexpr int part_rows = 2 * block_slots;

  KeySlots slots;
  std::int64_t row_batch = 0;  // rows of the slots, from one batch element or head to the next
  std::int64_t row_head = 0;
  int row_blocks = 0;     // blocks of slots of a kv head
  int segment_tiles = 0;  // query tiles of a unit
  SlotPartition partition;
  SlotRecord* records = nullptr;  // [B, Hkv, Sk] by arrival
  float* part_sums =
      nullptr;  // [cut parts, 2, block_slots, 2 * D]: dk, dv in the order of accumulators
  float* part_dbias = nullptr;  // [cut parts, 2, block_slots]
};

struct BackwardKernelParams {
  // In 64-byte units: the TMA unit reads them.
  CUtensorMap q_map;
  CUtensorMap dout_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  BackwardParams backward;
  KeyInfo info;
  float* row_stats = nullptr;  // [B, Hq, query tiles] RowStats
  float* dq_accum = nullptr;   // [B, Hq, query tiles] DqAccumLayout; null: not wanted
  OrderSemaphores order;       // of the additions to it
  SlotParams slots;
};

}  // namespace flash_dmattn::cuda::sm90
