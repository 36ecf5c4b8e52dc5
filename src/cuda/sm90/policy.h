#pragma once

#include <array>
#include <cstdint>

// Tile policies of the forward as data.
namespace flash_dmattn::cuda::sm90 {

// The head dims that kernels are compiled for, their buckets.
inline constexpr std::array head_dims = {64, 96, 128, 192, 256};

// The bucket of a head dim; loads pad a smaller head dim with zeros.
constexpr int head_dim_bucket(int head_dim) {
  for (const int bucket : head_dims)
    if (head_dim <= bucket) return bucket;
  return head_dims.back();
}

// The way in which K and V are loaded to shared memory.
enum class KeyLoad : std::uint8_t {
  tma,     // consecutive keys, tiles by the TMA unit
  gather,  // rows of a key list, or of consecutive keys, by cp.async
  any,     // the same for rows with any strides, including q
};

// The way in which a mask and a bias with a query dimension are read.
enum class DenseAccess : std::uint8_t {
  none,      // there are none
  tiles,     // from shared memory, with the mask packed; key tiles that it leaves empty are skipped
  elements,  // one by one, with any dtype and strides
};

// Whether kernels of a head-dim bucket support ranks. Above D 128 there are no registers for them.
constexpr bool has_ranks(int head_dim) { return head_dim <= 128; }

// The compile-time choices of a forward kernel.
struct ForwardVariant {
  KeyLoad load = KeyLoad::tma;
  bool has_key_info = false;  // intervals, mask or bias of keys; without it only TMA tiles
  DenseAccess dense = DenseAccess::none;
  bool shapes = false;  // supports shapes_scores()
  // If false, each batch of products runs alone, with the same bits, for tests.
  bool overlaps = true;

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

// Whether biases of keys may have a delay. Elsewhere a test for it would spill registers of the loop; KeyLoad::any takes
// such calls, except for dense masks above D 128.
constexpr bool supports_delay(int head_dim, const ForwardVariant& variant) {
  if (head_dim > 128 && variant.load == KeyLoad::gather) return false;
  if (head_dim > 128 && variant.dense == DenseAccess::elements) return false;
  return variant.has_key_info && variant.dense != DenseAccess::tiles;
}

// Whether a call with few work tiles has neither a work counter nor a flag for rows that are recomputed. With a dense
// mask or bias, a test for them would spill registers.
constexpr bool can_be_short(const ForwardVariant& variant) {
  return variant.dense == DenseAccess::none;
}

// Whether three warps of the producer can compute key info (forward/key_info_warps.cuh).
constexpr bool can_compute_key_info(const ForwardVariant& variant) {
  return can_be_short(variant) && variant.load == KeyLoad::tma && variant.has_key_info;
}

// The most keys of a call that is short and computes key info. With more, blocks would wait for it.
inline constexpr int most_computed_key_info = 2048;

// Whether a block that has one work tile recomputes rows itself (forward/fix_rows.cuh). In other kernels that call would
// spill registers of the main loop.
constexpr bool fixes_rows(int head_dim, const ForwardVariant& variant) {
  return can_be_short(variant) && head_dim <= 128;
}

constexpr ForwardVariant with_overlap(ForwardVariant variant, bool overlaps) {
  variant.overlaps = overlaps;
  return variant;
}

// The fewest columns of V for which there is a kernel of a variant; loads pad a smaller V with zeros. D 192 has kernels for
// 128 columns (multi-head latent attention).
constexpr int smallest_value_dim(int head_dim, const ForwardVariant& variant) {
  const bool exists = variant.dense == DenseAccess::none && !variant.shapes;
  return head_dim == 192 && exists ? 128 : head_dim;
}

struct ForwardPolicy {
  int warpgroups;       // consumers, with 64 queries each
  int keys;             // keys of a tile
  int q_stages;         // tiles of q in shared memory
  int stages;           // stages of K and of V
  int dense_stages;     // stages of a dense mask and bias, each for a warpgroup's queries
  bool has_mask_bytes;  // whether there is room for an unpacked mask
  // The registers of a thread, set by setmaxnreg: 128 * producer + 128 * warpgroups * consumer <= 64512.
  int producer_registers;
  int consumer_registers;

  constexpr int rows() const { return 64 * warpgroups; }
  constexpr int threads() const { return 128 * (1 + warpgroups); }
};

// There are three warpgroups where their registers suffice, which is without key info, with 80 keys at D 128, so that K
// and V are read from the L2 once for 192 queries. With biases and ranges 160 registers are not enough.
//
// D 128 with key info has 128 keys in two stages. Four stages of 64 keys are 25 % slower, and 56 registers for the
// producer 7 %. Lists are of 128 queries; 192 queries against 80 keys would be 4 % faster.
//
// D 96 has the room of D 128 in shared memory and fewer accumulators, for 112 keys in two stages.
//
// At D 256 the accumulators of 256 columns take 128 registers of a thread, and K and V take all of shared memory, for
// 80 keys, or for 64 with key info. At D 192 these are 112 keys, or three stages of 64; with 128 columns of V they are
// 128 keys in two stages, as at D 128 with key info.
//
// With a dense mask and bias, only D 64 has room for a second tile of q, for three warpgroups, which read biases when
// they add them, and for the bytes of masks. This is 19 % faster, including the launch of the packing. At D 128 bytes
// leave two dense stages, and each byte belongs to one row of scores, which is as fast as packing.
constexpr ForwardPolicy forward_policy(int head_dim, int value_dim, const ForwardVariant& variant) {
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
  if (!variant.has_key_info && head_dim <= 128) {
    policy.warpgroups = 3;
    policy.producer_registers = 24;
    policy.consumer_registers = 160;
  }
  switch (head_dim) {
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
    case 96:
      if (has_dense_tiles) policy.q_stages = 1;
      if (!variant.has_key_info) policy.keys = 112;
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
      policy.keys = variant.has_key_info ? 64 : head_dim == 192 ? 112 : 80;
      if (variant.has_key_info && head_dim == 192) policy.stages = 3;
      if (value_dim == 128) {
        policy.keys = 128;
        policy.stages = 2;
      }
      if (!variant.has_key_info) {
        policy.producer_registers = 24;
        policy.consumer_registers = 240;
      }
  }
  return policy;
}

}  // namespace flash_dmattn::cuda::sm90
