#pragma once

#include <cuda.h>

#include "cuda/common/integers.h"
#include "cuda/params.h"
#include "cuda/selection/key_slots.h"
#include "cuda/sm90/backward_policy.h"
#include "cuda/sm90/key_info.h"
#include "cuda/sm90/listed_keys.h"
#include "cuda/sm90/slot_parts.h"

namespace flash_dmattn::cuda::sm90 {

// The queries [first, last) that see a key, and its bias in units of the accumulator that it initializes; -inf if mask
// or bias hide the key.
struct alignas(16) KeyRecord {
  int first;
  int last;
  int key;
  float bias;
};

// Keys in slots. A key's rows of dk and dv are stored when it leaves its slot. If a cut divides a key, its rows are
// first stored as fp32 parts: every part of a chain has two for each slot, of the key that it begins with and of the
// key that it ends with.
struct SlotParams {
  static constexpr int block_slots = 128;
  static constexpr int part_rows = 2 * block_slots;

  KeySlots slots;
  std::int64_t row_batch = 0;  // rows of the slots, from one batch element or head to the next
  std::int64_t row_head = 0;
  int row_blocks = 0;     // blocks of slots of a kv head
  int segment_tiles = 0;  // query tiles of a unit
  SlotPartition partition;
  KeyRecord* records = nullptr;  // [B, Hkv, Sk] by arrival
  float* part_sums =
      nullptr;  // [cut parts, 2, block_slots, 2 * D]: dk, dv in the order of accumulators
  float* part_dbias = nullptr;  // [cut parts, 2, block_slots]
};

// A query tile that a block of keys visits, with a dense mask or bias.
struct alignas(8) QueryVisit {
  int tile;
  std::uint32_t head : 28;
  std::uint32_t masked : 1;  // by the packed mask, somewhere
  // Of two heads whose dS is summed (DenseDbias::sums_heads): the next visit is, or the previous one was, of the other.
  std::uint32_t first_of_two : 1;
  std::uint32_t second_of_two : 1;
  std::uint32_t same_dense : 1;  // mask and bias are those of the previous visit
};

// For each block of keys the query tiles that it visits, of all heads of the group (find_visits.cuh): one head after
// the other, or the heads of a tile together.
struct QueryVisitLists {
  QueryVisit* visits = nullptr;  // [B, Hkv, key blocks, capacity]
  int* count = nullptr;          // [B, Hkv, key blocks]
  int capacity = 0;
  bool heads_together = false;

  __host__ __device__ static int key_blocks(const Shape& shape) {
    return ceil_div(shape.seqlen_k, BackwardPolicy::keys);
  }
  __device__ static int list(const Shape& shape, int batch, int kv_head, int key) {
    return (batch * shape.heads_kv + kv_head) * key_blocks(shape) + key / BackwardPolicy::keys;
  }
};

// The gradient of a dense bias.
struct DenseDbias {
  // Two heads of a group share its elements, which a block stores as the sum of both.
  bool sums_heads = false;
  // The main loop stores zeros for the tiles that no block computes.
  bool clears = false;
  // Tiles are stored by the TMA unit.
  bool by_tma = false;
};

// The parameters of the main loop. Its tensors may be copies: q has the sign of the scale, and with a key list there
// are only its keys.
struct BackwardKernelParams {
  // In 64-byte units: the TMA unit reads them.
  CUtensorMap q_map;
  CUtensorMap dout_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  CUtensorMap bias_map;   // of a dense bias
  CUtensorMap dbias_map;  // of its gradient, DenseDbias::by_tma
  BackwardParams backward;
  float bias_factor = 0;  // of a bias, to the unit of the accumulators that begin with it
  float dq_scale = 0;
  ListedKeys list;
  Shape info_shape;  // with all keys, where `list` has some
  KeyInfo info;
  QueryVisitLists visits;
  DenseDbias dense_dbias;
  float* row_stats = nullptr;  // [B, Hq, query tiles] RowStats
  float* dq_accum = nullptr;   // [B, Hq, query tiles] DqAccumLayout; null: not wanted
  OrderSemaphores order;       // of the additions to it
  SlotParams slots;
  // Of blocks of neighbouring keys (BackwardCall::set_block_order): the kv heads of a section (KeyTile), and how many blocks
  // of a head are a run; the keys of a head's runs descend and ascend in turn. 1: all ascend.
  int section_heads = 1;
  int run_blocks = 1;
};

}  // namespace flash_dmattn::cuda::sm90
