#pragma once

#include <algorithm>
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
  gather,  // rows of a tile list, or of consecutive keys, by cp.async
  any,     // the same for rows with any strides, including q
};

// The way in which a mask and a bias with a query dimension are read.
enum class DenseAccess : std::uint8_t {
  none,      // there are none
  tiles,     // from shared memory, with the mask packed; key tiles that it leaves empty are skipped
  elements,  // one by one, with any dtype and strides
};

// The compile-time choices of a forward kernel.
struct ForwardVariant {
  KeyLoad load = KeyLoad::tma;
  bool has_key_info = false;  // intervals, mask or bias of keys; without it only TMA tiles
  DenseAccess dense = DenseAccess::none;
  // Supports shapes_scores(), and adds biases of keys to finished products, not to accumulators (has_references).
  bool shapes = false;
  // If false, each batch of products runs alone, with the same bits, for tests.
  bool overlaps = true;

  bool operator==(const ForwardVariant&) const = default;
};

inline constexpr std::array forward_variants = {
    ForwardVariant{},
    ForwardVariant{.has_key_info = true},
    ForwardVariant{.load = KeyLoad::gather, .has_key_info = true},
    ForwardVariant{.has_key_info = true, .shapes = true},
    ForwardVariant{.load = KeyLoad::gather, .has_key_info = true, .shapes = true},
    ForwardVariant{.load = KeyLoad::any, .has_key_info = true, .shapes = true},
    ForwardVariant{.has_key_info = true, .dense = DenseAccess::tiles},
    ForwardVariant{
        .load = KeyLoad::any, .has_key_info = true, .dense = DenseAccess::elements, .shapes = true},
};

// The variant of either direction with its member `overlaps` set.
template <class Variant>
constexpr Variant with_overlap(Variant variant, bool overlaps) {
  variant.overlaps = overlaps;
  return variant;
}

// Above D 128 the shaped scores of gathered keys would spill registers of the loop; KeyLoad::any takes such calls.
constexpr bool has_kernel(int head_dim, const ForwardVariant& variant) {
  return head_dim <= 128 || variant.load != KeyLoad::gather || !variant.shapes;
}

// Whether a kernel adds biases of keys less a reference of their row. Elements of a dense mask or bias leave too few
// registers for that above D 192.
constexpr bool has_references(int head_dim, const ForwardVariant& variant) {
  return variant.shapes && (head_dim <= 192 || variant.dense == DenseAccess::none);
}

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

// The inputs of a score besides q and k, by which policies differ. If keys are gathered, every thread of the producer forms
// addresses, which takes registers.
enum class ScoreInputs : std::uint8_t { none, key_info, gathered_key_info, dense_tiles };

constexpr ScoreInputs score_inputs(const ForwardVariant& variant) {
  if (variant.dense == DenseAccess::tiles) return ScoreInputs::dense_tiles;
  if (variant.load == KeyLoad::gather) return ScoreInputs::gathered_key_info;
  return variant.has_key_info ? ScoreInputs::key_info : ScoreInputs::none;
}

struct ForwardPolicyRow {
  int head_dim;
  int value_dim;
  ScoreInputs inputs;
  ForwardPolicy policy;
};

// Two warpgroups are the rule. Three read K and V from the L2 once for 192 queries instead of 128, but have 160 registers
// for a thread, which are too few for key info.
inline constexpr std::array forward_policies = {
    // head dim, of V, inputs        { warpgroups, keys, q stages, stages, dense stages, mask bytes, registers }
    ForwardPolicyRow{64, 64, ScoreInputs::none, {3, 128, 2, 4, 0, false, 24, 160}},
    ForwardPolicyRow{64, 64, ScoreInputs::key_info, {2, 128, 2, 4, 0, false, 40, 232}},
    ForwardPolicyRow{64, 64, ScoreInputs::gathered_key_info, {2, 128, 2, 4, 0, false, 72, 216}},
    // Only D 64 has room for a second tile of q, for three warpgroups, which read biases when they add them, and for the
    // bytes of masks. This is 19 % faster, including the launch of the packing.
    ForwardPolicyRow{64, 64, ScoreInputs::dense_tiles, {3, 128, 2, 2, 4, true, 24, 160}},

    // D 96 has the room of D 128 in shared memory and fewer accumulators, for 112 keys in two stages.
    ForwardPolicyRow{96, 96, ScoreInputs::none, {3, 112, 2, 2, 0, false, 24, 160}},
    ForwardPolicyRow{96, 96, ScoreInputs::key_info, {2, 128, 2, 2, 0, false, 40, 232}},
    ForwardPolicyRow{96, 96, ScoreInputs::gathered_key_info, {2, 128, 2, 2, 0, false, 72, 216}},
    ForwardPolicyRow{96, 96, ScoreInputs::dense_tiles, {2, 128, 1, 2, 3, false, 40, 232}},

    ForwardPolicyRow{128, 128, ScoreInputs::none, {3, 80, 2, 3, 0, false, 24, 160}},
    // Four stages of 64 keys are 25 % slower, and 56 registers for the producer 7 %. Lists are of 128 queries; 192 queries
    // against 80 keys would be 4 % faster.
    ForwardPolicyRow{128, 128, ScoreInputs::key_info, {2, 128, 2, 2, 0, false, 40, 232}},
    ForwardPolicyRow{128, 128, ScoreInputs::gathered_key_info, {2, 128, 2, 2, 0, false, 72, 216}},
    // Bytes of masks would leave two dense stages. Each byte belongs to one row of scores, which is as fast as packing.
    ForwardPolicyRow{128, 128, ScoreInputs::dense_tiles, {2, 128, 1, 2, 3, false, 40, 232}},

    // With 128 columns of V there is room for the keys of D 128 with key info.
    ForwardPolicyRow{192, 128, ScoreInputs::none, {2, 128, 1, 2, 0, false, 24, 240}},
    ForwardPolicyRow{192, 128, ScoreInputs::key_info, {2, 128, 1, 2, 0, false, 40, 232}},
    ForwardPolicyRow{192, 128, ScoreInputs::gathered_key_info, {2, 128, 1, 2, 0, false, 72, 216}},
    ForwardPolicyRow{192, 192, ScoreInputs::none, {2, 112, 1, 2, 0, false, 24, 240}},
    ForwardPolicyRow{192, 192, ScoreInputs::key_info, {2, 64, 1, 3, 0, false, 40, 232}},
    ForwardPolicyRow{192, 192, ScoreInputs::gathered_key_info, {2, 64, 1, 3, 0, false, 72, 216}},
    ForwardPolicyRow{192, 192, ScoreInputs::dense_tiles, {2, 64, 1, 3, 3, false, 40, 232}},

    // The accumulators of 256 columns take 128 registers of a thread, and K and V take all of shared memory.
    ForwardPolicyRow{256, 256, ScoreInputs::none, {2, 80, 1, 2, 0, false, 24, 240}},
    ForwardPolicyRow{256, 256, ScoreInputs::key_info, {2, 64, 1, 2, 0, false, 40, 232}},
    ForwardPolicyRow{256, 256, ScoreInputs::gathered_key_info, {2, 64, 1, 2, 0, false, 72, 216}},
    ForwardPolicyRow{256, 256, ScoreInputs::dense_tiles, {2, 64, 1, 2, 3, false, 40, 232}},
};

constexpr ForwardPolicy forward_policy(int head_dim, int value_dim, const ForwardVariant& variant) {
  const ScoreInputs inputs = score_inputs(variant);
  const auto is_row = [&](const ForwardPolicyRow& row) {
    return row.head_dim == head_dim && row.value_dim == value_dim && row.inputs == inputs;
  };
  return std::find_if(forward_policies.begin(), forward_policies.end(), is_row)->policy;
}

}  // namespace flash_dmattn::cuda::sm90
