#pragma once

#include <array>
#include <cstdint>

// Tile policies of the forward as data.
namespace flash_dmattn::cuda::sm90 {

// How K and V are loaded to shared memory.
enum class KeyLoad : std::uint8_t {
  tma,     // consecutive keys, tiles by the TMA unit
  gather,  // rows of a key list, or of consecutive keys, by cp.async
  any,     // the same of rows with any strides, q included
};

// How a mask and a bias with a query dimension are read.
enum class DenseAccess : std::uint8_t {
  none,      // there are none
  tiles,     // from shared memory, the mask packed; key tiles that are empty in it are skipped
  elements,  // one by one, of any dtype and strides
};

// Whether kernels of a head-dim bucket support ranks: at D 256 there are no registers for them.
constexpr bool has_ranks(int head_dim_bucket) { return head_dim_bucket <= 128; }

// The compile-time choices of a forward kernel.
struct ForwardVariant {
  KeyLoad load = KeyLoad::tma;
  bool has_key_info = false;  // intervals, mask or bias of keys; without it TMA tiles alone
  DenseAccess dense = DenseAccess::none;
  bool shapes = false;   // has shapes_scores(), too
  bool overlaps = true;  // else each batch of products runs alone, with the same bits: for tests

  bool operator==(const ForwardVariant&) const = default;
};

inline constexpr std::array forward_variants = {
    ForwardVariant{},
    ForwardVariant{.has_key_info = true},
    ForwardVariant{.load = KeyLoad::gather, .has_key_info = true},
    ForwardVariant{.has_key_info = true, .shapes = true},
    ForwardVariant{.load = KeyLoad::any, .has_key_info = true, .shapes = true},
    ForwardVariant{.has_key_info = true, .dense = DenseAccess::tiles},
    ForwardVariant{
        .load = KeyLoad::any, .has_key_info = true, .dense = DenseAccess::elements, .shapes = true},
};

// Whether a call with few work tiles has neither a work counter nor a flag for rows that are computed again: a test for them
// would spill registers where a mask or bias has a query dimension.
constexpr bool can_be_short(const ForwardVariant& variant) {
  return variant.dense == DenseAccess::none;
}

// Whether a block that has one work tile recomputes rows itself (fix_forward.cuh). In other kernels the call for it would
// spill registers of the main loop.
constexpr bool fixes_rows(int head_dim_bucket, const ForwardVariant& variant) {
  return can_be_short(variant) && head_dim_bucket <= 128;
}

constexpr ForwardVariant with_overlap(ForwardVariant variant, bool overlaps) {
  variant.overlaps = overlaps;
  return variant;
}

struct ForwardPolicy {
  int warpgroups;       // that compute, 64 queries each
  int keys;             // of a tile
  int q_stages;         // tiles of q in shared memory
  int stages;           // of K and of V
  int dense_stages;     // of a dense mask and bias, for a warpgroup's queries each
  bool has_mask_bytes;  // whether there is room for a mask that has not been packed
  // Of a thread, by setmaxnreg: 128 * producer + 128 * warpgroups * consumer <= 64512.
  int producer_registers;
  int consumer_registers;

  constexpr int rows() const { return 64 * warpgroups; }
  constexpr int threads() const { return 128 * (1 + warpgroups); }
};

// Three warpgroups where their registers suffice: without key info, and 80 keys at D 128, so that K and V are read from
// the L2 once for 192 queries. With biases and ranges 160 registers are not enough. D 128 with key info: 128 keys in two
// stages; lists are of 128 queries (192 of them against 80 keys would be 4 % faster). Slower: 64 keys in four stages, 25
// %; 56 registers for the producer, 7 %. D 256: the accumulators of 256 columns take 128 registers of a thread, and K and
// V all of shared memory: 80 keys, 64 with key info. With a dense mask and bias a second tile of q fits at D 64 alone,
// and three warpgroups, which read biases only when they add them, and the bytes of masks: 19 % faster, launch of the
// packing included. At D 128 these leave two dense stages, and each byte is of one row of scores: as fast as packing.
constexpr ForwardPolicy forward_policy(int head_dim_bucket, const ForwardVariant& variant) {
  const bool has_dense_tiles = variant.dense == DenseAccess::tiles;
  ForwardPolicy policy{.warpgroups = 2,
                       .keys = 128,
                       .q_stages = 2,
                       .stages = 2,
                       .dense_stages = has_dense_tiles ? 3 : 0,
                       .has_mask_bytes = false,
                       .producer_registers = 40,
                       .consumer_registers = 232};
  if (variant.load == KeyLoad::gather) {
    policy.producer_registers = 72;
    policy.consumer_registers = 216;
  }
  if (!variant.has_key_info && head_dim_bucket <= 128) {
    policy.warpgroups = 3;
    policy.producer_registers = 24;
    policy.consumer_registers = 160;
  }
  switch (head_dim_bucket) {
    case 64:
      policy.stages = 4;
      if (has_dense_tiles) {
        policy.warpgroups = 3;
        policy.stages = 2;
        policy.dense_stages = 4;
        policy.has_mask_bytes = true;
        policy.producer_registers = 24;
        policy.consumer_registers = 160;
      }
      break;
    case 128:
      if (has_dense_tiles) policy.q_stages = 1;
      if (!variant.has_key_info) {
        policy.keys = 80;
        policy.stages = 3;
      }
      break;
    default:
      policy.q_stages = 1;
      policy.keys = variant.has_key_info ? 64 : 80;
      if (!variant.has_key_info) {
        policy.producer_registers = 24;
        policy.consumer_registers = 240;
      }
  }
  return policy;
}

}  // namespace flash_dmattn::cuda::sm90
