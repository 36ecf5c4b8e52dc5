#pragma once

#include <cstdint>

#include "cuda/selection/order/rank_order.cuh"

// Sorts rows of tens of thousands of keys, all at once, with a kernel that packs the keys and one kernel for each eight
// bits of their scores. A CTA has a tile of a row. The offsets of its keys follow from two numbers of keys of each
// digit: in the row, which the first kernel counts for all passes, and in earlier tiles, which each tile publishes. The
// last pass stores the order and its inverse instead of the keys. Tiles are numbered as blocks start, so
// earlier tiles are running or done, and every wait for them ends.
//
// It replaces CUB's device-wide sort, which gives 5760 keys to a CTA and so occupies a third of an H200. 8 rows of
// 32768 f32 scores are selected in 55 us instead of 86.
namespace flash_dmattn::cuda::per_query {

struct RowPasses {
  static constexpr int digit_bits = 8;
  static constexpr int digits = 1 << digit_bits;
  static constexpr int threads = 512;  // the first `digits` threads have a digit each
  static constexpr int warps = threads / warp_size;
  static constexpr int digit_warps = digits / warp_size;
  static constexpr int min_blocks = 2;
  static constexpr int thread_keys = 4;
  static constexpr int warp_keys = thread_keys * warp_size;
  static constexpr int tile_keys = threads * thread_keys;
  static constexpr int max_passes = 32 / digit_bits;
  // Every CTA of a pass reads the counts of all tiles of its row.
  static constexpr int max_tiles = 64;
  static constexpr int max_keys = max_tiles * tile_keys;
  // The number of combinations of a chunk and a block of positions; chunk 0 may be short.
  static constexpr int max_counts = (max_keys / chunk_ranks + 1) * (max_keys / block_positions);

  int tiles = 0;   // tiles of a row
  int passes = 0;  // score bits / digit_bits
  // Both are [passes, rows, tiles, digits]: the number of keys of a digit in a tile, before the first pass; and before
  // this pass, plus 1, once the tile has published it.
  std::uint32_t* counts = nullptr;
  std::uint32_t* published = nullptr;
  std::uint32_t* started = nullptr;  // [passes] number of blocks of the pass that have started

  __device__ std::int64_t row_begin(const OrderedRows& rows, int pass, int row) const {
    return (static_cast<std::int64_t>(pass) * rows.rows + row) * tiles * digits;
  }
};

// Sorts the keys of a batch and scatters their ranks. The passes alternate between the two buffers from `packed` on,
// and `rows` gets order and ranks in the buffer that the last pass writes.
void sort_passes(const ScoredKeys& keys, OrderedRows& rows, const RowWindows& windows,
                 const RowPasses& passes, std::uint64_t* packed, std::uint64_t* other,
                 cudaStream_t stream);

}  // namespace flash_dmattn::cuda::per_query
