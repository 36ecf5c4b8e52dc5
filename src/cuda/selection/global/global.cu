#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/selection/global/global.cuh"

namespace flash_dmattn::cuda::global {
namespace {

// The state after `digit` digits, for digit > 0 from the histogram of the preceding digit. All threads of the CTA call
// this function and get the same result.
__device__ Found find_digits(const RadixRows& rows, int digit, int row) {
  if (digit == 0) return {0, rows.window};
  __shared__ std::uint32_t warp_sums[threads / warp_size];
  __shared__ Found result;
  const Found before =
      digit == 1 ? Found{0, rows.window} : rows.found[(digit - 1) * rows.rows + row];
  const std::uint32_t* histogram = rows.histogram(digit - 1, row);
  const int lane = lane_id();
  const int warp = warp_id();
  const int first_bin = bins - 1 - static_cast<int>(threadIdx.x) * thread_bins;  // best bin first
  std::uint32_t count[thread_bins];
  int sum = 0;
#pragma unroll
  for (int i = 0; i < thread_bins; ++i) {
    count[i] = histogram[first_bin - i];
    sum += static_cast<int>(count[i]);
  }
  const int through = warp_inclusive_sum(sum, lane);
  if (lane == warp_size - 1) warp_sums[warp] = static_cast<std::uint32_t>(through);
  __syncthreads();
  std::int64_t better = through - sum;
  for (int w = 0; w < warp; ++w) better += warp_sums[w];
#pragma unroll
  for (int i = 0; i < thread_bins; ++i) {
    if (better < before.rank && before.rank <= better + count[i]) {
      const int width = min(digit_bits, rows.number_bits - (digit - 1) * digit_bits);
      result = {before.digits << width | static_cast<std::uint64_t>(first_bin - i),
                before.rank - better};
    }
    better += count[i];
  }
  __syncthreads();
  return result;
}

__global__ void __launch_bounds__(threads) count_digit(RadixRows rows, int digit) {
  wait_for_previous_kernel();
  __shared__ std::uint32_t counts[bins];
  const int row = static_cast<int>(blockIdx.x) / rows.ctas_per_row();
  const int part = static_cast<int>(blockIdx.x) % rows.ctas_per_row();
  const Found found = find_digits(rows, digit, row);
  if (part == 0 && threadIdx.x == 0) rows.found[digit * rows.rows + row] = found;
#pragma unroll
  for (int i = 0; i < thread_bins; ++i) counts[i * threads + static_cast<int>(threadIdx.x)] = 0;
  __syncthreads();
  const int below = rows.bits_below(digit);
  const int width = rows.number_bits - digit * digit_bits - below;
#pragma unroll
  for (int i = 0; i < thread_keys; ++i) {
    const int position = part * cta_keys + i * threads + static_cast<int>(threadIdx.x);
    if (position >= rows.seqlen_k) break;
    const std::uint64_t number = rows.number(row, position) >> below;
    if (number >> width == found.digits) {
      atomicAdd(&counts[number & ((std::uint64_t{1} << width) - 1)], 1u);
    }
  }
  __syncthreads();
  std::uint32_t* histogram = rows.histogram(digit, row);
#pragma unroll
  for (int i = 0; i < thread_bins; ++i) {
    const int bin = i * threads + static_cast<int>(threadIdx.x);
    if (counts[bin] != 0) atomicAdd(&histogram[bin], counts[bin]);
  }
}

__global__ void __launch_bounds__(threads) keep_best(RadixRows rows) {
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.x) / rows.ctas_per_row();
  const int part = static_cast<int>(blockIdx.x) % rows.ctas_per_row();
  const std::uint64_t last = find_digits(rows, rows.searched_digits(), row).digits;
  KeyInterval* intervals =
      rows.intervals + static_cast<std::int64_t>(rows.first_row + row) * rows.seqlen_k;
#pragma unroll
  for (int i = 0; i < thread_keys; ++i) {
    const int position = part * cta_keys + i * threads + static_cast<int>(threadIdx.x);
    if (position >= rows.seqlen_k) break;
    const std::uint64_t number = rows.number(row, position);
    const bool chosen = number >= last && number >> rows.position_bits != ScoredKeys::never;
    store(intervals + position,
          chosen ? rows.queries.interval_to_last_query(position) : KeyInterval{0, 0});
  }
}

}  // namespace

RadixRows lay_out(const SelectionArgs& args, int batch_rows, WorkspaceAllocator& workspace) {
  RadixRows rows;
  rows.keys = ScoredKeys(args);
  rows.queries = QueryClip(args);
  rows.intervals = args.intervals;
  rows.rows = batch_rows;
  rows.seqlen_k = static_cast<int>(args.seqlen_k);
  rows.window = static_cast<int>(std::min(args.rule.window, args.seqlen_k));
  rows.position_bits = bits_for(args.seqlen_k);
  rows.number_bits = rows.position_bits + score_bits(args.scores_dtype);
  const std::int64_t row_digits = std::int64_t{rows.searched_digits()} * rows.rows;
  rows.histograms = workspace.take<std::uint32_t>(row_digits * bins);
  rows.found = workspace.take<Found>(row_digits);
  return rows;
}

void select_best(const RadixRows& rows, cudaStream_t stream) {
  const int digits = rows.searched_digits();
  const int blocks = digits > 0 ? cluster_blocks(rows.rows, rows.seqlen_k) : 0;
  if (blocks > 0) {
    select_in_clusters({.rows = rows, .blocks = blocks}, stream);
    return;
  }
  const std::int64_t ctas = std::int64_t{rows.rows} * rows.ctas_per_row();
  if (digits > 0) {
    const std::size_t histogram_bytes =
        sizeof(std::uint32_t) * bins * static_cast<std::size_t>(digits * rows.rows);
    check(cudaMemsetAsync(rows.histograms, 0, histogram_bytes, stream), "clearing histograms");
  }
  for (int digit = 0; digit < digits; ++digit) {
    launch_grid<count_digit>({ctas, threads}, stream, rows, digit);
  }
  launch_grid<keep_best>({ctas, threads}, stream, rows);
}

}  // namespace flash_dmattn::cuda::global
