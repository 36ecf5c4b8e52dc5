#pragma once

#include <array>
#include <cstdint>

// Tile policies as data: one entry for each head-dim bucket and shared-memory class.
namespace flash_dmattn::cuda::sm80 {

// The head dims that kernels are compiled for, their buckets; src/cuda/sm80/CMakeLists.txt has the same list.
inline constexpr std::array head_dims = {64, 128, 256};

// The bucket of a head dim; loads pad a smaller head dim with zeros.
constexpr int head_dim_bucket(int head_dim) {
  for (const int bucket : head_dims)
    if (head_dim <= bucket) return bucket;
  return head_dims.back();
}

// The fewest queries of a tile.
inline constexpr int min_tile_rows = 32;

// The shared memory that a block may have. sm_86, sm_89 and sm_120 have 99 KB. sm_80 has 163 KB and sm_90 has 227 KB,
// and one policy covers both.
enum class SharedClass : std::uint8_t { kb99, kb163 };

// A kernel as compiled for a class. It has its own type, and thus symbol, even if both classes have the same policy, so
// that a launch never finds the code of the other class's target.
template <class Kernel, SharedClass S>
struct OfClass : Kernel {};

constexpr unsigned shared_bytes(SharedClass shared) {
  return (shared == SharedClass::kb99 ? 99 : 163) * 1024;
}

// A forward block computes warps * warp_rows queries against tiles of `keys` keys, two in flight.
struct ForwardPolicy {
  int warps;
  int warp_rows;
  int keys;
  int min_blocks;  // per multiprocessor, for the register limit

  constexpr int rows() const { return warps * warp_rows; }
};

constexpr ForwardPolicy forward_policy(int head_dim_bucket, SharedClass shared) {
  if (head_dim_bucket <= 128) return {.warps = 4, .warp_rows = 32, .keys = 64, .min_blocks = 2};
  if (shared == SharedClass::kb99)
    return {.warps = 4, .warp_rows = 16, .keys = 32, .min_blocks = 1};
  return {.warps = 8, .warp_rows = 16, .keys = 32, .min_blocks = 1};
}

// With a dense mask or bias its tile is in shared memory as well. At D 128 with 32 rows per warp there is then no
// room for a second block. At D 64, three blocks of 4 warps of 16 rows take 20 % longer, and so do 8 warps of 16 rows
// and tiles of 32 keys.
constexpr ForwardPolicy dense_forward_policy(int head_dim_bucket, SharedClass shared) {
  if (head_dim_bucket == 64) return {.warps = 4, .warp_rows = 32, .keys = 64, .min_blocks = 2};
  if (head_dim_bucket == 128) {
    return {.warps = 4,
            .warp_rows = 16,
            .keys = shared == SharedClass::kb99 ? 32 : 64,
            .min_blocks = 2};
  }
  if (shared == SharedClass::kb99)
    return {.warps = 2, .warp_rows = 16, .keys = 32, .min_blocks = 1};
  return {.warps = 8, .warp_rows = 16, .keys = 32, .min_blocks = 1};
}

// A backward block computes `rows` queries against tiles of `keys` keys. Its warps split the score
// tile [rows, keys], the dk and dv tiles [keys, D] and the dq tile [rows, D] in grids that have
// score_warps, key_warps and query_warps rows of warps.
struct BackwardPolicy {
  int warps;
  int rows;
  int keys;
  int stages;  // K/V tiles in shared memory
  int score_warps;
  int key_warps;
  int query_warps;
  int min_blocks;
};

constexpr BackwardPolicy backward_policy(int head_dim_bucket, SharedClass shared) {
  const bool small = shared == SharedClass::kb99;
  if (head_dim_bucket == 64 || (head_dim_bucket == 128 && !small)) {
    return {.warps = 8,
            .rows = 128,
            .keys = 64,
            .stages = 2,
            .score_warps = 4,
            .key_warps = 2,
            .query_warps = 4,
            .min_blocks = 1};
  }
  if (head_dim_bucket == 128 || !small) {
    return {.warps = 8,
            .rows = 64,
            .keys = 32,
            .stages = 2,
            .score_warps = 4,
            .key_warps = 2,
            .query_warps = 4,
            .min_blocks = 1};
  }
  return {.warps = 4,
          .rows = 32,
          .keys = 32,
          .stages = 1,
          .score_warps = 2,
          .key_warps = 2,
          .query_warps = 2,
          .min_blocks = 1};
}

// The number of keys of a block of the key-major backward kernel.
constexpr int owned_keys = 128;

// Whether there is a key-major backward kernel. Its accumulators of dk and dv, 128 keys of D columns, must fit into the
// registers of 8 warps, and K, V and two stages of q and dout into shared memory (163 KB at D 128, 99 KB at D 64).
constexpr bool has_key_major_backward(int head_dim_bucket, SharedClass shared) {
  return head_dim_bucket == 64 || (head_dim_bucket == 128 && shared != SharedClass::kb99);
}

// Whether that kernel sums the gradients of a dense bias over the two heads of a group. This takes 32 registers, which
// are not free with accumulators of 128 columns.
constexpr bool sums_dense_dbias(int head_dim_bucket) { return head_dim_bucket == 64; }

}  // namespace flash_dmattn::cuda::sm80
