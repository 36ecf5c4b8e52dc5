#pragma once

#include <cstdint>

#include "cuda/selection/rank_order.cuh"

// Sorting rows of some ten thousand keys, all at once: a kernel that packs the keys and one for each
// eight bits of their scores. A CTA has a tile of a row. The place of its keys follows from the number of
// keys of each digit in the row, which the first kernel counts for all passes, and the number of them in
// the tiles before, which each tile publishes.
namespace flash_dmattn::cuda::per_query {

struct RowPasses {
  static constexpr int digit_bits = 8;
  static constexpr int digits = 1 << digit_bits;
  static constexpr int threads = digits;  // one for each digit
  static constexpr int warps = threads / warp_size;
  static constexpr int thread_keys = 8;
  static constexpr int warp_keys = thread_keys * warp_size;
  static constexpr int tile_keys = threads * thread_keys;
  static constexpr int max_passes = 32 / digit_bits;
  // Every CTA of a pass reads the counts of all tiles of its row.
  static constexpr int max_tiles = 64;
  static constexpr int max_keys = max_tiles * tile_keys;

  int tiles = 0;   // of a row
  int passes = 0;  // score bits / digit_bits
  // Both [passes, rows, tiles, digits]: keys of a digit in a tile, before the first pass; and before this
  // one, and 1 more, once the tile has published it.
  std::uint32_t* counts = nullptr;
  std::uint32_t* announced = nullptr;

  __device__ std::int64_t row_begin(const Rows& rows, int pass, int row) const {
    return (static_cast<std::int64_t>(pass) * rows.rows + row) * tiles * digits;
  }
};

__device__ inline int digit_of(const KeyLayout& layout, std::uint64_t key, int pass) {
  return static_cast<int>(key >> (layout.position_bits + pass * RowPasses::digit_bits)) &
         (RowPasses::digits - 1);
}

// `packed` [rows, Sk] in the order of falling positions, and the counts of all passes.
__global__ void __launch_bounds__(RowPasses::threads)
    pack_and_count(ScoredKeys keys, Rows rows, RowPasses passes, std::uint64_t* packed) {
  wait_for_previous_kernel();
  __shared__ std::uint32_t counts[RowPasses::max_passes][RowPasses::digits];
  const int row = static_cast<int>(blockIdx.x) / passes.tiles;
  const int tile = static_cast<int>(blockIdx.x) % passes.tiles;
  const int thread = static_cast<int>(threadIdx.x);
  for (int pass = 0; pass < passes.passes; ++pass) counts[pass][thread] = 0;
  __syncthreads();
  const KeysDescending<RowPasses::thread_keys> own(
      keys, rows, row, tile * RowPasses::tile_keys + thread, RowPasses::threads);
#pragma unroll
  for (int i = 0; i < RowPasses::thread_keys; ++i) {
    const int position = own.position[i];
    if (position < 0) break;
    const int at = rows.seqlen_k - 1 - position;
    const std::uint64_t key = rows.layout.pack(row, own.code[i], position);
    packed[static_cast<std::int64_t>(row) * rows.seqlen_k + at] = key;
    for (int pass = 0; pass < passes.passes; ++pass)
      atomicAdd(&counts[pass][digit_of(rows.layout, key, pass)], 1u);
  }
  __syncthreads();
  for (int pass = 0; pass < passes.passes; ++pass) {
    const std::int64_t to = passes.row_begin(rows, pass, row) + tile * RowPasses::digits + thread;
    passes.counts[to] = counts[pass][thread];
    passes.announced[to] = 0;
  }
}

// The lanes of `lanes` whose digit is this one's.
__device__ inline unsigned lanes_with(int digit, unsigned lanes) {
#pragma unroll
  for (int bit = 0; bit < RowPasses::digit_bits; ++bit) {
    const unsigned set = __ballot_sync(full_mask, (digit >> bit & 1) != 0);
    lanes &= (digit >> bit & 1) != 0 ? set : ~set;
  }
  return lanes;
}

// The sum of the counts of a digit that `tiles` tiles have published. A count is published plus 1, so it is
// its own ready flag (0: not yet) and relaxed order suffices. The tiles belong to blocks that started before
// this one and that wait for no later one.
__device__ inline int sum_announced(const std::uint32_t* from, int tiles) {
  constexpr int together = 16;  // whose loads are in flight at a time
  int sum = 0;
  for (int first = 0; first < tiles; first += together) {
    int part = 0;
    bool all_there = false;
    while (!all_there) {
      all_there = true;
      part = 0;
#pragma unroll
      for (int i = 0; i < together; ++i) {
        const std::uint32_t value =
            first + i < tiles ? load_relaxed(from + (first + i) * RowPasses::digits) : 1u;
        all_there = all_there && value != 0;
        part += static_cast<int>(value) - 1;
      }
    }
    sum += part;
  }
  return sum;
}

// Orders the keys of each row by one digit; equal ones stay in order.
__global__ void __launch_bounds__(RowPasses::threads)
    sort_digit(Rows rows, RowPasses passes, int pass, const std::uint64_t* from,
               std::uint64_t* to) {
  wait_for_previous_kernel();
  constexpr int warps = RowPasses::warps;
  __shared__ int warp_sums[warps];
  // Of a warp and a digit: keys so far, then the place of the first.
  __shared__ int places[warps][RowPasses::digits];
  const int row = static_cast<int>(blockIdx.x) / passes.tiles;
  const int tile = static_cast<int>(blockIdx.x) % passes.tiles;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = warp_id();
  const int lane = lane_id();
  const std::int64_t row_begin = static_cast<std::int64_t>(row) * rows.seqlen_k;
  const std::int64_t counts_begin = passes.row_begin(rows, pass, row) + thread;

  const int first = tile * RowPasses::tile_keys + warp * RowPasses::warp_keys + lane;
  std::uint64_t key[RowPasses::thread_keys];
#pragma unroll
  for (int i = 0; i < RowPasses::thread_keys; ++i) {
    const int at = first + i * warp_size;
    key[i] = at < rows.seqlen_k ? from[row_begin + at] : 0;
  }
  int of_row = 0;  // keys of this thread's digit
#pragma unroll 8
  for (int t = 0; t < passes.tiles; ++t)
    of_row += static_cast<int>(passes.counts[counts_begin + t * RowPasses::digits]);
#pragma unroll
  for (int w = 0; w < warps; ++w) places[w][thread] = 0;
  const int through = warp_inclusive_sum(of_row, lane);
  if (lane == warp_size - 1) warp_sums[warp] = through;
  __syncthreads();

  int rank[RowPasses::thread_keys];  // among the warp's keys of the digit
#pragma unroll
  for (int i = 0; i < RowPasses::thread_keys; ++i) {
    const bool exists = first + i * warp_size < rows.seqlen_k;
    const int digit = digit_of(rows.layout, key[i], pass);
    const unsigned lanes = lanes_with(digit, __ballot_sync(full_mask, exists));
    int& count = places[warp][digit];
    const int so_far = count;
    rank[i] = so_far + count_before(lanes, lane);
    __syncwarp();
    if (exists && count_before(lanes, lane) == 0) count = so_far + __popc(lanes);
    __syncwarp();
  }
  __syncthreads();
  int of_tile = 0;
#pragma unroll
  for (int w = 0; w < warps; ++w) of_tile += places[w][thread];
  std::uint32_t* const announced = passes.announced + counts_begin;
  store_relaxed(announced + tile * RowPasses::digits, static_cast<std::uint32_t>(of_tile) + 1);
  int place = through - of_row;
  for (int w = 0; w < warp; ++w) place += warp_sums[w];
  place += sum_announced(announced, tile);
#pragma unroll
  for (int w = 0; w < warps; ++w) {
    const int count = places[w][thread];
    places[w][thread] = place;
    place += count;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < RowPasses::thread_keys; ++i) {
    if (first + i * warp_size >= rows.seqlen_k) break;
    to[row_begin + places[warp][digit_of(rows.layout, key[i], pass)] + rank[i]] = key[i];
  }
}

}  // namespace flash_dmattn::cuda::per_query
