#include "cuda/selection/order/row_passes.cuh"

#include <cstdint>
#include <utility>

#include "cuda/primitives/ptx.cuh"

namespace flash_dmattn::cuda::per_query {
namespace {

__device__ int digit_of(const KeyLayout& layout, std::uint64_t key, int pass) {
  return static_cast<int>(key >> (layout.position_bits + pass * RowPasses::digit_bits)) &
         (RowPasses::digits - 1);
}

__device__ bool has_digit() { return threadIdx.x < RowPasses::digits; }

// Makes `packed` [rows, Sk] in the order of falling positions and the counts of all passes, and clears the sums of
// later kernels.
__global__ void __launch_bounds__(RowPasses::threads)
    pack_and_count(ScoredKeys keys, OrderedRows rows, RowPasses passes, std::uint64_t* packed) {
  wait_for_previous_kernel();
  __shared__ std::uint32_t counts[RowPasses::max_passes][RowPasses::digits];
  const int row = static_cast<int>(blockIdx.x) / passes.tiles;
  const int tile = static_cast<int>(blockIdx.x) % passes.tiles;
  const int thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread < passes.passes) passes.started[thread] = 0;
  for (int i = thread; i < passes.passes * RowPasses::digits; i += RowPasses::threads) {
    counts[i / RowPasses::digits][i % RowPasses::digits] = 0;
  }
  const int totals = rows.blocks * rows.groups;  // the last pass adds to them
  for (int i = tile * RowPasses::threads + thread; i < totals;
       i += passes.tiles * RowPasses::threads) {
    rows.totals[rows.block_of_row(row, 0) * rows.groups + i] = 0;
  }
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
  for (int i = thread; i < passes.passes * RowPasses::digits; i += RowPasses::threads) {
    const int pass = i / RowPasses::digits;
    const int digit = i % RowPasses::digits;
    const std::int64_t to = passes.row_begin(rows, pass, row) + tile * RowPasses::digits + digit;
    passes.counts[to] = counts[pass][digit];
    passes.published[to] = 0;
  }
}

// Sums the counts of a digit that `tiles` tiles have published. A count is published plus 1, so that it is its own
// ready flag (0 if unpublished), and relaxed order suffices.
__device__ int sum_published(const std::uint32_t* from, int tiles) {
  constexpr int together = 16;  // loads in flight at a time
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

// ---- One pass -----------------------------------------------------------------------------------

// The keys of a thread. A warp has warp_keys consecutive keys, and a lane every 32nd of these.
struct PassKeys {
  static constexpr int count = RowPasses::thread_keys;
  int first;  // offset of the first key in the row
  int end;    // end of the row
  std::uint64_t key[count];

  __device__ PassKeys(const std::uint64_t* row, int end_, int tile)
      : first(tile * RowPasses::tile_keys + warp_id() * RowPasses::warp_keys + lane_id()),
        end(end_) {
#pragma unroll
    for (int i = 0; i < count; ++i) key[i] = exists(i) ? row[first + i * warp_size] : 0;
  }
  __device__ bool exists(int i) const { return first + i * warp_size < end; }
};

struct PassStorage {
  int work;
  int warp_sums[2][RowPasses::digit_warps];
  // For each digit, the offset of its keys in the row minus their offset in the tile.
  int from_tile_to_row[RowPasses::digits];
  std::uint64_t keys[RowPasses::tile_keys];  // ordered by the digit
  union {
    // For each warp and digit, the number of keys so far, and later the place of the first key in the tile.
    int offsets[RowPasses::warps][RowPasses::digits];
    std::uint32_t
        counts[RowPasses::max_counts];  // counts of positions by block and chunk, at the end
  };
};

// Sums the values of the digits before this thread's digit. Contains one barrier of all threads.
__device__ int sum_before_digit(int value, int (&warp_sums)[RowPasses::digit_warps]) {
  const int through = warp_inclusive_sum(value, lane_id());
  if (has_digit() && lane_id() == warp_size - 1) warp_sums[warp_id()] = through;
  __syncthreads();
  int before = through - value;
#pragma unroll
  for (int w = 0; w < RowPasses::digit_warps; ++w) before += w < warp_id() ? warp_sums[w] : 0;
  return before;
}

// The counts of keys with a thread's digit, before the first pass.
struct DigitCounts {
  int in_row = 0;
  int in_earlier = 0;  // in the tiles before `tile`

  __device__ DigitCounts(const std::uint32_t* tile_counts, int tiles, int tile) {
    constexpr int together = 16;  // loads in flight at a time
    for (int first = 0; first < tiles; first += together) {
      int count[together];
#pragma unroll
      for (int i = 0; i < together; ++i) {
        const int t = first + i;
        count[i] = t < tiles ? static_cast<int>(tile_counts[t * RowPasses::digits]) : 0;
      }
#pragma unroll
      for (int i = 0; i < together; ++i) {
        in_row += count[i];
        in_earlier += first + i < tile ? count[i] : 0;
      }
    }
  }
};

// Turns the counts of this thread's digit, one for each warp, into the offsets of the warps' first keys. The first
// warp's offset is `offset`.
__device__ void offset_warps(PassStorage& shared, int offset) {
  const int digit = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int w = 0; w < RowPasses::warps; ++w) {
    const int count = shared.offsets[w][digit];
    shared.offsets[w][digit] = offset;
    offset += count;
  }
}

// The keys of a tile in the order of a digit. A thread has every RowPasses::threads-th key.
struct OrderedKeys {
  static constexpr int count = RowPasses::thread_keys;
  std::uint64_t key[count];
  int place[count];  // places in the row

  __device__ OrderedKeys(const PassStorage& shared, const KeyLayout& layout, int pass,
                         int tile_size) {
#pragma unroll
    for (int i = 0; i < count; ++i) key[i] = at(i) < tile_size ? shared.keys[at(i)] : 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      place[i] = at(i) + shared.from_tile_to_row[digit_of(layout, key[i], pass)];
    }
  }
  static __device__ int at(int i) { return i * RowPasses::threads + static_cast<int>(threadIdx.x); }
};

// Finishes a tile in the last pass: scatters the ranks, and counts the positions of the chunks by block.
__device__ void scatter_tile(const OrderedRows& rows, int row, int tile_size, PassStorage& shared,
                             const OrderedKeys& keys) {
  const int counts = rows.blocks * rows.chunks;
  const auto thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < counts; i += RowPasses::threads) shared.counts[i] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < OrderedKeys::count; ++i) {
    if (keys.at(i) >= tile_size) break;
    const int rank = keys.place[i];
    const int position = rows.layout.position(keys.key[i]);
    const bool valid = rows.layout.valid(keys.key[i]);
    scatter_rank(rows, row, rank, position, valid);
    const int block = position / block_positions;
    if (valid) atomicAdd(&shared.counts[block * rows.chunks + rows.chunk_of(rank)], 1u);
  }
  __syncthreads();
  // Every chunk is a group. A tile has keys of few chunks, because each of its digits has about the tile's share of the
  // row.
  std::uint32_t* const totals = rows.totals + rows.block_of_row(row, 0) * rows.groups;
  for (int i = thread; i < counts; i += RowPasses::threads) {
    if (shared.counts[i] != 0) atomicAdd(totals + i, shared.counts[i]);
  }
}

// Takes the number of this block's tile, counted over all rows in the order in which blocks start.
__device__ int take_work(std::uint32_t* started, PassStorage& shared) {
  if (threadIdx.x == 0) shared.work = static_cast<int>(atomicAdd(started, 1u));
  __syncthreads();
  return shared.work;
}

// Orders the keys of each row by one digit, stably. The last pass does not use `to`.
__global__ void __launch_bounds__(RowPasses::threads, RowPasses::min_blocks)
    sort_digit(OrderedRows rows, RowWindows windows, RowPasses passes, int pass,
               const std::uint64_t* from, std::uint64_t* to) {
  wait_for_previous_kernel();
  __shared__ PassStorage shared;
  const int work = take_work(passes.started + pass, shared);
  const int row = work / passes.tiles;
  const int tile = work % passes.tiles;
  const auto thread = static_cast<int>(threadIdx.x);  // also its digit, if it has one
  const int warp = warp_id();
  const std::int64_t row_begin = static_cast<std::int64_t>(row) * rows.seqlen_k;
  const std::int64_t counts_begin = passes.row_begin(rows, pass, row) + thread;
  const PassKeys keys(from + row_begin, rows.seqlen_k, tile);
  const DigitCounts before_pass(passes.counts + counts_begin, has_digit() ? passes.tiles : 0, tile);
  for (int i = thread; i < RowPasses::warps * RowPasses::digits; i += RowPasses::threads) {
    shared.offsets[i / RowPasses::digits][i % RowPasses::digits] = 0;
  }
  const int row_offset = sum_before_digit(before_pass.in_row, shared.warp_sums[0]);

  int bin[PassKeys::count];
  unsigned same[PassKeys::count];  // lanes with a key in the same bin
  int rank[PassKeys::count];       // rank among the warp's keys with the same digit
#pragma unroll
  for (int i = 0; i < PassKeys::count; ++i) {
    bin[i] = keys.exists(i) ? digit_of(rows.layout, keys.key[i], pass) : -1;
    same[i] = lanes_with_same<RowPasses::digit_bits>(bin[i]) & warp_ballot(keys.exists(i));
  }
  take_numbers(bin, same, shared.offsets[warp], rank);
  __syncthreads();
  int in_tile = 0;
  std::uint32_t* const published = passes.published + counts_begin;
  if (has_digit()) {
#pragma unroll
    for (int w = 0; w < RowPasses::warps; ++w) in_tile += shared.offsets[w][thread];
    store_relaxed(published + tile * RowPasses::digits, static_cast<std::uint32_t>(in_tile) + 1);
  }
  const int tile_offset = sum_before_digit(in_tile, shared.warp_sums[1]);
  if (has_digit()) offset_warps(shared, tile_offset);
  __syncthreads();
  // The keys of a digit are stored together. If the lanes scattered their keys, each store would be a separate sector.
#pragma unroll
  for (int i = 0; i < PassKeys::count; ++i) {
    if (bin[i] >= 0) shared.keys[shared.offsets[warp][bin[i]] + rank[i]] = keys.key[i];
  }
  if (has_digit()) {
    const int in_earlier = pass > 0 ? sum_published(published, tile) : before_pass.in_earlier;
    shared.from_tile_to_row[thread] = row_offset + in_earlier - tile_offset;
  }
  __syncthreads();
  const int tile_size = min(rows.seqlen_k - tile * RowPasses::tile_keys, RowPasses::tile_keys);
  const OrderedKeys ordered(shared, rows.layout, pass, tile_size);
  if (pass == passes.passes - 1) {
    windows.set(rows, row);
    scatter_tile(rows, row, tile_size, shared, ordered);
    return;
  }
#pragma unroll
  for (int i = 0; i < OrderedKeys::count; ++i) {
    if (ordered.at(i) < tile_size) to[row_begin + ordered.place[i]] = ordered.key[i];
  }
}

}  // namespace

void sort_passes(const ScoredKeys& keys, OrderedRows& rows, const RowWindows& windows,
                 const RowPasses& passes, std::uint64_t* packed, std::uint64_t* other,
                 cudaStream_t stream) {
  const Grid grid{std::int64_t{rows.rows} * passes.tiles, RowPasses::threads};
  launch_grid<pack_and_count>(grid, stream, keys, rows, passes, packed);
  for (int pass = 0; pass < passes.passes; ++pass) {
    if (pass == passes.passes - 1) rows.store_order_in(other);
    launch_grid<sort_digit>(grid, stream, rows, windows, passes, pass, packed, other);
    std::swap(packed, other);
  }
}

}  // namespace flash_dmattn::cuda::per_query
