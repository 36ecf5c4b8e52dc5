#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "cuda/common/ptx.cuh"
#include "cuda/device.h"
#include "cuda/selection/device.cuh"

// Rows of keys that clusters of blocks have: the shape of a cluster, and the sum of its counts.
namespace flash_dmattn::cuda::cluster_rows {

inline constexpr int threads = 512;
inline constexpr int warps = threads / warp_size;
inline constexpr int most_blocks = 16;
// A cluster runs in one of the eight groups of a GPU's multiprocessors, and of 132 some group may have fewer than 16:
// with one block to a multiprocessor an eighth cluster of 16 would wait until another one has ended.
inline constexpr int min_blocks = 2;

// Of the cluster of a row, a power of two; 1 where the GPU has no clusters. Two thousand keys to a block: more blocks
// add up more counts.
inline int blocks_of_row(std::int64_t seqlen_k) {
  const auto wanted = std::bit_ceil(static_cast<std::uint64_t>(ceil_div(seqlen_k, 2048)));
  const int most = std::min(most_cluster_blocks(current_device()), most_blocks);
  return static_cast<int>(std::min(wanted, static_cast<std::uint64_t>(most)));
}

// Whether the clusters of all rows fit on the GPU.
inline bool run_at_once(std::int64_t rows, int blocks) {
  return rows * blocks <= std::int64_t{min_blocks} * current_device().multiprocessors;
}

// A count of every block of the cluster, summed, and summed over the blocks before this one.
template <class Sum>
struct BlockSums {
  Sum all{};
  Sum before{};

  // `mine` is this block's; all loads are on their way at once, and no two blocks begin with the same one.
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
