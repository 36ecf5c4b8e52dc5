#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "common/kv_cache/head_slots.h"
#include "cuda/device.h"
#include "cuda/sm80/policy.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/kv_cache.h"

// Chooses the kernel for few queries over many keys, and the number of blocks that share the keys.
namespace flash_dmattn::cuda::sm80::few_queries {

// A block computes 16 row_warps rows against tiles of `keys` keys, of which `stages` are in shared memory. A row is a
// query of one of the heads that share a kv head. The key_warps warps with the same rows divide the keys of each tile.
struct Policy {
  int row_warps;
  int key_warps;
  int keys;
  int stages;
  int min_blocks;  // per multiprocessor

  constexpr int rows() const { return 16 * row_warps; }
  constexpr int warps() const { return row_warps * key_warps; }
  constexpr int warp_keys() const { return keys / key_warps; }
};

struct Choice {
  DType dtype = DType::bf16;
  int head_dim = 0;  // the bucket: 64, 128 or 256
  SharedClass shared = SharedClass::kb163;
  bool many_rows = false;  // a kv head has more than 16 rows
  bool elementwise =
      false;  // masks and biases that differ between rows are read element by element
};

struct PolicyRow {
  int head_dim;
  bool many_rows;
  Policy kb99;
  Policy kb163;
};

// The loads of the next tiles must be in flight while a tile is computed: at least 64 KB for each multiprocessor. On an
// H200, 131,072 keys of D 128 take 125.7 us with three blocks of two stages per multiprocessor, 127.4 with two blocks
// of three stages, and 134.5 with one block of four.
inline constexpr std::array policies = {
    // head dim, many rows  { row warps, key warps, keys, stages, min blocks } of 99 KB, of 163 KB
    PolicyRow{64, false, {1, 4, 64, 4, 1}, {1, 4, 64, 4, 3}},
    PolicyRow{64, true, {4, 1, 64, 4, 2}, {4, 1, 64, 4, 2}},
    PolicyRow{128, false, {1, 4, 64, 2, 1}, {1, 4, 64, 2, 3}},
    PolicyRow{128, true, {4, 1, 32, 4, 2}, {4, 1, 32, 4, 2}},
    PolicyRow{256, false, {1, 2, 32, 2, 1}, {1, 2, 32, 2, 3}},
    // 64 rows of q and two stages do not fit into 99 KB.
    PolicyRow{256, true, {2, 1, 32, 2, 1}, {4, 1, 32, 3, 1}},
};

constexpr Policy policy_of(int head_dim_bucket, SharedClass shared, bool many_rows) {
  const auto row = std::find_if(policies.begin(), policies.end(), [&](const PolicyRow& r) {
    return r.head_dim == head_dim_bucket && r.many_rows == many_rows;
  });
  return shared == SharedClass::kb99 ? row->kb99 : row->kb163;
}

constexpr Policy policy_of(const Choice& c) { return policy_of(c.head_dim, c.shared, c.many_rows); }

// The name of a choice, such as "sm80 few_queries bf16 d128 rows16 163KB".
std::string name(const Choice& choice);
// The name of a decode step, such as "sm80 decode_step bf16 d128 rows16 163KB".
std::string step_name(const Choice& choice);

std::vector<Choice> split_choices(SharedClass shared);
// The choices for decode steps, which have no masks or biases that differ between rows.
std::vector<Choice> step_choices(SharedClass shared);

Choice choose_kernel(const Problem& p, SharedClass shared);

// The division of a call's rows and keys among blocks. It depends on shapes and the GPU alone, so that a call can be
// captured in a graph.
struct Split {
  int row_tiles = 0;  // row tiles of a kv head
  int splits = 1;     // blocks that share the keys of a row tile
  bool in_cluster =
      false;  // these blocks are a cluster and add their parts; otherwise another kernel does
};

// `most_keys` is the most keys that a row tile visits.
Split split_keys(const Problem& p, const Policy& policy, std::int64_t most_keys,
                 const DeviceProperties& device);

// The blocks of the heads of a KV cache, if these have different numbers of slots: more for a head with more slots. The
// head with most slots begins first, then those of one tile, and the others by their slots.
struct HeadBlocks {
  std::uint16_t first[most_unequal_heads + 1] = {};  // of the heads in this order, for one row
  std::uint8_t head[most_unequal_heads] = {};
  std::uint8_t place[most_unequal_heads] = {};  // of a head in this order
  // Blocks with slots of the heads in this order, in clusters.
  std::uint8_t used[most_unequal_heads] = {};
};

// The Split of one row tile for each head of a cache. `splits` is the most blocks of a head. In a cluster each head has
// that many, and those for which it has no slots end at once.
Split split_heads(const KvCacheShape& shape, const Policy& policy, const DeviceProperties& device,
                  HeadBlocks& blocks);

}  // namespace flash_dmattn::cuda::sm80::few_queries
