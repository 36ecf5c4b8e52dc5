#pragma once

#include <algorithm>
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

// A backward block computes `rows` queries against tiles of `keys` keys. Its warps split the score tile [rows, keys] and
// the dq tile [rows, D] in grids of row_warps rows of warps, and the dk and dv tiles [keys, D] in grids of two.
struct BackwardPolicy {
  int warps;
  int rows;
  int keys;
  int stages;  // K/V tiles in shared memory
  int row_warps;
};

// The policies of a head-dim bucket and shared-memory class.
struct PolicyRow {
  int head_dim;
  SharedClass shared;
  ForwardPolicy forward;
  ForwardPolicy dense_forward;  // with a tile of a dense mask or bias in shared memory as well
  BackwardPolicy backward;      // query-major
};

inline constexpr std::array policies = {
    // head dim, class            { warps, warp rows, keys, min blocks } x 2, { warps, rows, keys, stages, row warps }
    // Three blocks of 4 warps of 16 rows take 20 % longer with a dense mask, and so do 8 warps of 16 rows and tiles of
    // 32 keys.
    PolicyRow{64, SharedClass::kb99, {4, 32, 64, 2}, {4, 32, 64, 2}, {8, 128, 64, 2, 4}},
    PolicyRow{64, SharedClass::kb163, {4, 32, 64, 2}, {4, 32, 64, 2}, {8, 128, 64, 2, 4}},
    // With a dense mask and 32 rows for each warp there is no room for a second block.
    PolicyRow{128, SharedClass::kb99, {4, 32, 64, 2}, {4, 16, 32, 2}, {8, 64, 32, 2, 4}},
    PolicyRow{128, SharedClass::kb163, {4, 32, 64, 2}, {4, 16, 64, 2}, {8, 128, 64, 2, 4}},
    PolicyRow{256, SharedClass::kb99, {4, 16, 32, 1}, {2, 16, 32, 1}, {4, 32, 32, 1, 2}},
    PolicyRow{256, SharedClass::kb163, {8, 16, 32, 1}, {8, 16, 32, 1}, {8, 64, 32, 2, 4}},
};

constexpr const PolicyRow& policies_of(int head_dim_bucket, SharedClass shared) {
  return *std::find_if(policies.begin(), policies.end(), [&](const PolicyRow& row) {
    return row.head_dim == head_dim_bucket && row.shared == shared;
  });
}

constexpr ForwardPolicy forward_policy(int head_dim_bucket, SharedClass shared) {
  return policies_of(head_dim_bucket, shared).forward;
}
constexpr ForwardPolicy dense_forward_policy(int head_dim_bucket, SharedClass shared) {
  return policies_of(head_dim_bucket, shared).dense_forward;
}
constexpr BackwardPolicy backward_policy(int head_dim_bucket, SharedClass shared) {
  return policies_of(head_dim_bucket, shared).backward;
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
