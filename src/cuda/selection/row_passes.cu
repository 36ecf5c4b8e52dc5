#include "cuda/selection/row_passes.cuh"

#include <cstdint>
#include <utility>

#include "cuda/common/ptx.cuh"

namespace flash_dmattn::cuda::per_query {
namespace {

__device__ int digit_of(const KeyLayout& layout, std::uint64_t key, int pass) {
  return static_cast<int>(key >> (layout.position_bits + pass * RowPasses::digit_bits)) &
         (RowPasses::digits - 1);
}

// `packed` [rows, Sk] in the order of falling positions, and the counts of all passes.
__global__ void __launch_bounds__(RowPasses::threads)
    pack_and_count(ScoredKeys keys, OrderedRows rows, RowPasses passes, std::uint64_t* packed) {
  wait_for_previous_kernel();
  __shared__ std::uint32_t counts[RowPasses::max_passes][RowPasses::digits];
  const int row = static_cast<int>(blockIdx.x) / passes.tiles;
  const int tile = static_cast<int>(blockIdx.x) % passes.tiles;
  const int thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread < passes.passes) passes.started[thread] = 0;
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
    passes.published[to] = 0;
  }
}

// The sum of the counts of a digit that `tiles` tiles have published. A count is published plus 1, so it is
// its own ready flag (0: not yet) and relaxed order suffices.
__device__ int sum_published(const std::uint32_t* from, int tiles) {
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

// ---- One pass -----------------------------------------------------------------------------------

// The keys of a thread: a warp has warp_keys consecutive ones, a lane every 32nd of them.
struct PassKeys {
  static constexpr int count = RowPasses::thread_keys;
  int first;  // offset of the first, in the row
  int end;    // of the row
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
  int warp_sums[RowPasses::warps];
  // Of a warp and a digit: keys so far, then the offset of the first.
  int offsets[RowPasses::warps][RowPasses::digits];
};

// Turns the counts of this thread's digit, one for each warp, into the offsets of the warps' first keys, the
// first warp's being `offset`.
__device__ void offset_warps(PassStorage& shared, int offset) {
  const int digit = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int w = 0; w < RowPasses::warps; ++w) {
    const int count = shared.offsets[w][digit];
    shared.offsets[w][digit] = offset;
    offset += count;
  }
}

// The number of this block's tile, of all rows, in the order in which blocks start.
__device__ int take_work(std::uint32_t* started, PassStorage& shared) {
  if (threadIdx.x == 0) shared.work = static_cast<int>(atomicAdd(started, 1u));
  __syncthreads();
  return shared.work;
}

// Orders the keys of each row by one digit; equal ones stay in order. A thread has keys, and a digit to count.
__global__ void __launch_bounds__(RowPasses::threads)
    sort_digit(OrderedRows rows, RowPasses passes, int pass, const std::uint64_t* from,
               std::uint64_t* to) {
  wait_for_previous_kernel();
  __shared__ PassStorage shared;
  const int work = take_work(passes.started + pass, shared);
  const int row = work / passes.tiles;
  const int tile = work % passes.tiles;
  const int digit = static_cast<int>(threadIdx.x);
  const int warp = warp_id();
  const std::int64_t row_begin = static_cast<std::int64_t>(row) * rows.seqlen_k;
  const std::int64_t counts_begin = passes.row_begin(rows, pass, row) + digit;
  const PassKeys keys(from + row_begin, rows.seqlen_k, tile);

  // How many keys of the row have smaller digits: a sum over the warp here, over the warps before below.
  int in_row = 0;
#pragma unroll 8
  for (int t = 0; t < passes.tiles; ++t)
    in_row += static_cast<int>(passes.counts[counts_begin + t * RowPasses::digits]);
  const int through = warp_inclusive_sum(in_row, lane_id());
  if (lane_id() == warp_size - 1) shared.warp_sums[warp] = through;
#pragma unroll
  for (int w = 0; w < RowPasses::warps; ++w) shared.offsets[w][digit] = 0;
  __syncthreads();

  int bin[PassKeys::count];
  int rank[PassKeys::count];  // among the keys of the warp with the same digit
#pragma unroll
  for (int i = 0; i < PassKeys::count; ++i) {
    bin[i] = keys.exists(i) ? digit_of(rows.layout, keys.key[i], pass) : -1;
  }
  take_numbers<RowPasses::digit_bits>(bin, shared.offsets[warp], rank);
  __syncthreads();
  int in_tile = 0;
#pragma unroll
  for (int w = 0; w < RowPasses::warps; ++w) in_tile += shared.offsets[w][digit];
  std::uint32_t* const published = passes.published + counts_begin;
  store_relaxed(published + tile * RowPasses::digits, static_cast<std::uint32_t>(in_tile) + 1);
  int offset = through - in_row;
  for (int w = 0; w < warp; ++w) offset += shared.warp_sums[w];
  offset_warps(shared, offset + sum_published(published, tile));
  __syncthreads();
#pragma unroll
  for (int i = 0; i < PassKeys::count; ++i) {
    if (!keys.exists(i)) break;
    to[row_begin + shared.offsets[warp][digit_of(rows.layout, keys.key[i], pass)] + rank[i]] =
        keys.key[i];
  }
}

}  // namespace

int sort_passes(const ScoredKeys& keys, const OrderedRows& rows, const RowPasses& passes,
                std::uint64_t* packed, std::uint64_t* other, cudaStream_t stream) {
  const Grid grid{std::int64_t{rows.rows} * passes.tiles, RowPasses::threads};
  launch_grid<pack_and_count>(grid, stream, keys, rows, passes, packed);
  for (int pass = 0; pass < passes.passes; ++pass) {
    launch_grid<sort_digit>(grid, stream, rows, passes, pass, packed, other);
    std::swap(packed, other);
  }
  return passes.passes;
}

}  // namespace flash_dmattn::cuda::per_query
