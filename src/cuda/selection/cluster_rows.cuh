#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "cuda/device.h"
#include "cuda/primitives/ptx.cuh"
#include "cuda/selection/device.cuh"

// The shape of clusters of blocks that each compute a row of keys, and the sum of a cluster's counts.
namespace flash_dmattn::cuda::cluster_rows {

inline constexpr int threads = 512;
inline constexpr int warps = threads / warp_size;
inline constexpr int most_blocks = 16;
// A cluster runs within one of the eight groups of a GPU's multiprocessors, and some group of the 132 may have fewer
// than 16. With one block per multiprocessor, an eighth cluster of 16 would wait until another has ended.
inline constexpr int min_blocks = 2;

// The number of blocks of a row's cluster, a power of two, or 1 if the GPU has no clusters. A block has two thousand
// keys, because more blocks have more counts to sum.
inline int blocks_of_row(std::int64_t seqlen_k) {
  const auto wanted = std::bit_ceil(static_cast<std::uint64_t>(ceil_div(seqlen_k, 2048)));
  const int most = std::min(most_cluster_blocks(current_device()), most_blocks);
  return static_cast<int>(std::min(wanted, static_cast<std::uint64_t>(most)));
}

// Whether the clusters of all rows fit on the GPU.
inline bool run_at_once(std::int64_t rows, int blocks) {
  return rows * blocks <= std::int64_t{min_blocks} * current_device().multiprocessors;
}

// The sum of a count over all blocks of the cluster, and over the blocks before this block.
template <class Sum>
struct BlockSums {
  Sum all{};
  Sum before{};

  // `mine` is this block's count. All loads are in flight at once, and no two blocks begin with the same block.
  template <class Count>
  __device__ void add(Count* mine, int rank, int blocks) {
#pragma unroll
    for (int i = 0; i < most_blocks; ++i) {
      const int block = (rank + i) & (blocks - 1);
      const Sum count = i < blocks ? Sum{*in_cluster_block(mine, block)} : Sum{};
      all += count;
      if (block < rank) before += count;
    }
  }
};

}  // namespace flash_dmattn::cuda::cluster_rows
