#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "cuda/primitives/integers.h"
#include "cuda/sm90/policy.h"

// Tile policies of the backward as data.
namespace flash_dmattn::cuda::sm90 {

// The placement of the keys of a block.
enum class KeyPlacement : std::uint8_t {
  block,  // neighbouring keys, each seen by every query or by those from its own position on
  block_key_info,  // neighbouring keys with ranges of queries, masks or biases
  slots,           // slots whose keys change (cuda/schedule/slots/key_slots.h)
};

// The compile-time choices of a backward kernel.
struct BackwardVariant {
  KeyPlacement placement = KeyPlacement::block;
  DenseAccess dense = DenseAccess::none;  // only with block_key_info
  // Whether the biases of keys have a delay. Only without a dense mask or bias, which leave no registers for it.
  bool delays = false;
  // If false, each batch of products runs alone, for tests. Bits are the same, except for the order of additions to dq.
  bool overlaps = true;
  // For calls where some row's lse is large (lse_is_large). It is launched with the kernel without it, and the flag decides
  // which of the two returns at once, because a loop with both forms would have too few registers.
  bool large_lse = false;

  constexpr bool has_info() const { return placement != KeyPlacement::block; }
  constexpr bool has_slots() const { return placement == KeyPlacement::slots; }
  constexpr bool has_dense() const { return dense != DenseAccess::none; }

  bool operator==(const BackwardVariant&) const = default;
};

constexpr BackwardVariant with_large_lse(BackwardVariant variant) {
  variant.large_lse = true;
  return variant;
}

inline constexpr std::array backward_variants = {
    BackwardVariant{},
    BackwardVariant{.placement = KeyPlacement::block_key_info},
    BackwardVariant{.placement = KeyPlacement::block_key_info, .dense = DenseAccess::tiles},
    BackwardVariant{.placement = KeyPlacement::block_key_info, .dense = DenseAccess::elements},
    BackwardVariant{.placement = KeyPlacement::slots},
    BackwardVariant{.placement = KeyPlacement::block_key_info, .delays = true},
    BackwardVariant{.placement = KeyPlacement::slots, .delays = true},
};

// Whether a head-dim bucket has a kernel of a variant. Above D 128 shared memory has no room for a dense mask or
// bias, and there is no kernel for delayed biases. At D 96 a kernel for DenseAccess::elements would spill registers in
// its loop.
constexpr bool has_kernel(int head_dim, const BackwardVariant& variant) {
  if (head_dim == 96) return variant.dense != DenseAccess::elements;
  return head_dim <= 128 || !(variant.has_dense() || variant.delays);
}

// The fewest columns of V and dout for which a head-dim bucket has kernels, as smallest_value_dim of the forward.
constexpr int smallest_value_dim(int head_dim, const BackwardVariant&) {
  return head_dim == 192 ? 128 : head_dim;
}

// The bucket of a head dim: the smallest that has a kernel of the variant.
constexpr int head_dim_bucket(int head_dim, const BackwardVariant& variant) {
  for (const int bucket : head_dims)
    if (head_dim <= bucket && has_kernel(bucket, variant)) return bucket;
  return head_dims.back();
}

// The division of dq of a query tile between the two warpgroups. Each part is a product of 64 queries over all keys.
enum class DqSplit : std::uint8_t {
  columns,      // a panel of 64 columns each; of three panels, the last in every other tile
  alternating,  // every other tile each, so dS is read once and there are twice as many accumulators
  rows,         // 64 of 128 queries each
};

// The division of the other work on a query tile between the two warpgroups.
enum class ConsumerSplit : std::uint8_t {
  keys,   // 64 of the block's 128 keys each, with all their gradients
  roles,  // the block's 64 keys: the first computes P and dV, the second dS and dK
};

struct BackwardPolicy {
  int rows;  // rows of a query tile
  DqSplit dq;
  ConsumerSplit split = ConsumerSplit::keys;
  int keys = 128;
  // Two blocks may have the keys of a work together. They exchange dS, and each computes half of the columns of dq.
  int cluster = 1;
  int dout_stages = 2;  // stages of dout; q has `stages`
  int score_tiles = 2;  // tiles of dS in shared memory
  // Whether the parts of dq of a query tile pass through the same shared memory, one after another.
  bool shares_dq_tile = false;
  // Whether dQ of a tile is multiplied during the next tile. Not with slots, whose keys change between tiles.
  bool late_dq = false;
  // Whether dK reads dS from shared memory instead of registers.
  bool shared_ds = false;
  // Whether registers keep the biases of a dense tile around the loop, so that heads that share them load them once.
  bool keeps_biases = false;

  static constexpr int warpgroups = 2;  // consumers
  static constexpr int stages = 2;
  static constexpr int threads = 128 * (1 + warpgroups);
  // 128 * producer + 256 * consumer <= 64512; this is the only pair with 240 registers for a consumer.
  static constexpr int producer_registers = 24;
  static constexpr int consumer_registers = 240;

  constexpr bool paired() const { return cluster == 2; }
  constexpr int work_keys() const { return keys * cluster; }
  // The parts of dq that the block makes of a query tile, and their columns.
  constexpr int dq_parts(int head_dim) const {
    if (dq == DqSplit::columns && !paired()) return head_dim / 64;
    return dq == DqSplit::alternating ? 1 : warpgroups;
  }
  // Of three parts, the third uses the tile of its warpgroup's first.
  constexpr int dq_tiles(int head_dim) const {
    return shares_dq_tile ? 1 : std::min(dq_parts(head_dim), warpgroups);
  }
  constexpr int dq_part_columns(int head_dim) const {
    return dq == DqSplit::columns ? 64 : head_dim;
  }
  // With DqSplit::columns, the panels that the warpgroups can make of a query tile. If dq has fewer, they take turns.
  constexpr int dq_places() const { return warpgroups * cluster; }
  constexpr bool takes_turns(int head_dim) const {
    return dq == DqSplit::columns && 64 * dq_places() > head_dim;
  }
};

// The keys of a block with a dense mask or bias.
inline constexpr int dense_block_keys = 128;

// The queries of a tile, between which slots change keys, and the maximum number of segments of a chain of slots.
inline constexpr int slot_tile_rows = 64;
inline constexpr int slot_segments = 64;
// The heads of a group whose additions to dq are published together, if they have an order.
inline constexpr int order_heads = 2;

// The inputs by which policies differ, besides head dims.
enum class BackwardInputs : std::uint8_t { none, key_info, dense, slots };

constexpr BackwardInputs backward_inputs(const BackwardVariant& variant) {
  if (variant.has_slots()) return BackwardInputs::slots;
  if (variant.has_dense()) return BackwardInputs::dense;
  return variant.has_info() ? BackwardInputs::key_info : BackwardInputs::none;
}

struct BackwardPolicyRow {
  int head_dim;
  int value_dim;
  BackwardInputs inputs;
  BackwardPolicy policy;
};

// The policy of a pair of blocks, above D 128.
constexpr BackwardPolicy pair_with(int dout_stages, int score_tiles, bool shares_dq_tile,
                                   bool late_dq) {
  return {.rows = 64,
          .dq = DqSplit::columns,
          .split = ConsumerSplit::roles,
          .keys = 64,
          .cluster = 2,
          .dout_stages = dout_stages,
          .score_tiles = score_tiles,
          .shares_dq_tile = shares_dq_tile,
          .late_dq = late_dq};
}

// Shared memory binds: the reads of a tile's operands take longer than the MMA.
inline constexpr std::array backward_policies = {
    // At D 64, dk and dv are half as large, so that 128 queries fit, which share a read of K and V. A late dQ gains
    // 12 %; key info takes registers that it needs, and so do the accumulators of D 128.
    BackwardPolicyRow{
        64, 64, BackwardInputs::none, {.rows = 128, .dq = DqSplit::rows, .late_dq = true}},
    BackwardPolicyRow{64, 64, BackwardInputs::key_info, {.rows = 128, .dq = DqSplit::rows}},
    // Dense masks and biases have tiles of 64 queries, like the packed mask. They have three tiles of dS, because two
    // heads are summed while the biases of a third tile are loaded; a fourth fits at D 64.
    BackwardPolicyRow{
        64,
        64,
        BackwardInputs::dense,
        {.rows = 64, .dq = DqSplit::alternating, .score_tiles = 4, .keeps_biases = true}},
    BackwardPolicyRow{
        64, 64, BackwardInputs::slots, {.rows = slot_tile_rows, .dq = DqSplit::alternating}},

    // At D 96 dq cannot be halved between panels.
    BackwardPolicyRow{96, 96, BackwardInputs::none, {.rows = 64, .dq = DqSplit::alternating}},
    BackwardPolicyRow{96, 96, BackwardInputs::key_info, {.rows = 64, .dq = DqSplit::alternating}},
    BackwardPolicyRow{
        96, 96, BackwardInputs::dense, {.rows = 64, .dq = DqSplit::alternating, .score_tiles = 3}},
    BackwardPolicyRow{
        96, 96, BackwardInputs::slots, {.rows = slot_tile_rows, .dq = DqSplit::alternating}},

    // At D 128 DqSplit::alternating reads less, but a block of neighbouring keys loses 3 % in waits. With slots there is
    // other work meanwhile, and it is 5 % faster.
    BackwardPolicyRow{128, 128, BackwardInputs::none, {.rows = 64, .dq = DqSplit::columns}},
    BackwardPolicyRow{128, 128, BackwardInputs::key_info, {.rows = 64, .dq = DqSplit::columns}},
    BackwardPolicyRow{
        128, 128, BackwardInputs::dense, {.rows = 64, .dq = DqSplit::columns, .score_tiles = 3}},
    BackwardPolicyRow{
        128, 128, BackwardInputs::slots, {.rows = slot_tile_rows, .dq = DqSplit::alternating}},

    // At D 192 there is room for two stages of dout; the four warpgroups of a pair make three panels of dq, and each has
    // none in every fourth tile. A V of 128 columns leaves room for two tiles of dS, so that dQ may be late. With it dK
    // and dV of 128 keys fit into the registers of one block, but in shared memory there is no room for key info.
    BackwardPolicyRow{
        192, 128, BackwardInputs::none, {.rows = 64, .dq = DqSplit::columns, .shared_ds = true}},
    BackwardPolicyRow{192, 128, BackwardInputs::key_info, pair_with(2, 2, false, true)},
    BackwardPolicyRow{192, 128, BackwardInputs::slots, pair_with(2, 2, false, false)},
    BackwardPolicyRow{192, 192, BackwardInputs::none, pair_with(2, 1, false, false)},
    BackwardPolicyRow{192, 192, BackwardInputs::key_info, pair_with(2, 1, false, false)},
    BackwardPolicyRow{192, 192, BackwardInputs::slots, pair_with(2, 1, false, false)},

    // At D 256 dk and dv of 64 keys fill the accumulators of both warpgroups, one of them each. Additions to dq bind
    // with 64 keys, so that pairs of blocks add once for 128. With slots, whose records take room, both warpgroups pass
    // dq through one tile.
    BackwardPolicyRow{256, 256, BackwardInputs::none, pair_with(1, 1, false, false)},
    BackwardPolicyRow{256, 256, BackwardInputs::key_info, pair_with(1, 1, false, false)},
    BackwardPolicyRow{256, 256, BackwardInputs::slots, pair_with(1, 1, true, false)},
};

constexpr BackwardPolicy backward_policy(int head_dim, int value_dim,
                                         const BackwardVariant& variant) {
  const BackwardInputs inputs = backward_inputs(variant);
  const auto is_row = [&](const BackwardPolicyRow& row) {
    return row.head_dim == head_dim && row.value_dim == value_dim && row.inputs == inputs;
  };
  return std::find_if(backward_policies.begin(), backward_policies.end(), is_row)->policy;
}

// The sums of dq in memory are tiles of `rows` queries, each in parts of 64 queries, in the order of the accumulators.
// Block j of eight columns has the four floats of 128 threads: two columns of a row and of row + 8.
template <int D, BackwardVariant Variant>
struct DqAccumLayout {
  static constexpr BackwardPolicy policy = backward_policy(D, D, Variant);
  static constexpr int rows = policy.rows;
  static constexpr int columns = D;
  static constexpr int floats = rows * D;
  static constexpr int part_columns = policy.dq_part_columns(D);
  static constexpr int part_floats = 64 * part_columns;

  template <class Shape>
  static constexpr std::int64_t count(const Shape& shape) {
    return std::int64_t{shape.batch} * shape.heads_q * ceil_div(shape.seqlen_q, rows);
  }
  // The offset of a thread's four floats of block `block`.
  static constexpr int thread_offset(int block, int thread) { return (block * 128 + thread) * 4; }
  // The offset of eight columns of a row and of the row 8 below it.
  static constexpr int offset(int row, int chunk) {
    const int part = policy.dq == DqSplit::rows ? row / 64 : chunk / (part_columns / 8);
    const int thread = row % 64 / 16 * 32 + row % 8 * 4;
    return part * part_floats + thread_offset(chunk % (part_columns / 8), thread);
  }
};

}  // namespace flash_dmattn::cuda::sm90
