#pragma once

#include <cstdint>

#include "cuda/selection/scored_keys.cuh"

// The w best keys of each row by radix selection. Score code above position makes one number of
// every key, and no two are equal; the w-th largest is found from the top digit down, with one
// histogram after the other of the keys that share the digits found so far. Every CTA that
// needs a digit derives it from the finished histogram, so no step waits for a single CTA.
namespace flash_dmattn::cuda::global {

inline constexpr int threads = 512;
inline constexpr int thread_keys = 4;
inline constexpr int cta_keys = threads * thread_keys;
inline constexpr int digit_bits = 11;
inline constexpr int bins = 1 << digit_bits;
inline constexpr int thread_bins = bins / threads;

// The digits of the w-th largest number found so far.
struct Found {
  std::uint64_t digits;
  std::int64_t rank;  // among the numbers that begin with these digits
};

struct Rows {
  ScoredKeys keys;
  QueryRange queries;
  KeyInterval* intervals = nullptr;  // [rows of all batches, Sk]
  int first_row = 0;                 // of the batch
  int rows = 0;
  int seqlen_k = 0;
  int window = 0;  // 0 < w < Sk
  int position_bits = 0;
  int number_bits = 0;
  std::uint32_t* histograms = nullptr;  // [digits, rows, bins], zeroed
  Found* found = nullptr;               // [digits, rows]: before that digit

  __host__ __device__ int digits() const { return ceil_div(number_bits, digit_bits); }
  // Bits below a digit; the last one may be narrower than the others.
  __device__ int bits_below(int digit) const {
    return max(number_bits - (digit + 1) * digit_bits, 0);
  }
  __device__ std::uint64_t number(int row, int position) const {
    return static_cast<std::uint64_t>(keys.code(first_row + row, position)) << position_bits |
           static_cast<std::uint64_t>(position);
  }
  __device__ std::uint32_t* histogram(int digit, int row) const {
    return histograms + (static_cast<std::int64_t>(digit) * rows + row) * bins;
  }
  __host__ __device__ int ctas_per_row() const { return ceil_div(seqlen_k, cta_keys); }
};

// The state after `digit` digits; for digit > 0 from the histogram of the one before. All threads of the
// CTA call it and get the same.
__device__ inline Found find_digits(const Rows& rows, int digit, int row) {
  if (digit == 0) return {0, rows.window};
  __shared__ std::uint32_t warp_sums[threads / warp_size];
  __shared__ Found result;
  const Found before =
      digit == 1 ? Found{0, rows.window} : rows.found[(digit - 1) * rows.rows + row];
  const std::uint32_t* histogram = rows.histogram(digit - 1, row);
  const int lane = lane_id();
  const int warp = warp_id();
  const int first_bin = bins - 1 - static_cast<int>(threadIdx.x) * thread_bins;  // the best first
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

__global__ void __launch_bounds__(threads) count_digit(Rows rows, int digit) {
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

__global__ void __launch_bounds__(threads) keep_best(Rows rows) {
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.x) / rows.ctas_per_row();
  const int part = static_cast<int>(blockIdx.x) % rows.ctas_per_row();
  const std::uint64_t last = find_digits(rows, rows.digits(), row).digits;
  KeyInterval* intervals =
      rows.intervals + static_cast<std::int64_t>(rows.first_row + row) * rows.seqlen_k;
#pragma unroll
  for (int i = 0; i < thread_keys; ++i) {
    const int position = part * cta_keys + i * threads + static_cast<int>(threadIdx.x);
    if (position >= rows.seqlen_k) break;
    const std::uint64_t number = rows.number(row, position);
    const bool chosen = number >= last && number >> rows.position_bits != ScoredKeys::never;
    store(intervals + position, chosen ? rows.queries.forever(position) : KeyInterval{0, 0});
  }
}

// The choice when the window holds every key.
__global__ void __launch_bounds__(threads) keep_valid(Rows rows) {
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.x) / rows.ctas_per_row();
  const int part = static_cast<int>(blockIdx.x) % rows.ctas_per_row();
  KeyInterval* intervals =
      rows.intervals + static_cast<std::int64_t>(rows.first_row + row) * rows.seqlen_k;
#pragma unroll
  for (int i = 0; i < thread_keys; ++i) {
    const int position = part * cta_keys + i * threads + static_cast<int>(threadIdx.x);
    if (position >= rows.seqlen_k) break;
    const bool valid = rows.keys.code(rows.first_row + row, position) != ScoredKeys::never;
    store(intervals + position, valid ? rows.queries.forever(position) : KeyInterval{0, 0});
  }
}

}  // namespace flash_dmattn::cuda::global
