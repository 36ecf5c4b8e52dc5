#pragma once

#include <cstdint>

#include "cuda/selection/scored_keys.cuh"

// Finds the w best keys of each row by radix selection. The score code above the position makes one number of every
// key, and no two numbers are equal. The w-th largest is found from the top digit down, with successive histograms of
// the keys that share the digits found so far. Every CTA that needs a digit derives it from the finished histogram, so
// no step waits for a single CTA.
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
  std::int64_t rank;  // rank among the numbers that begin with these digits
};

struct RadixRows {
  ScoredKeys keys;
  QueryClip queries;
  KeyInterval* intervals = nullptr;  // [rows of all batches, Sk]
  int first_row = 0;                 // of the batch
  int rows = 0;
  int seqlen_k = 0;
  int window = 0;  // 0 < w <= Sk
  int position_bits = 0;
  int number_bits = 0;
  std::uint32_t* histograms = nullptr;  // [digits, rows, bins], zeroed
  Found* found = nullptr;               // [digits, rows] state before each digit

  // The number of digits of the w-th largest number; none if the window has room for every key.
  __host__ __device__ int searched_digits() const {
    return window < seqlen_k ? ceil_div(number_bits, digit_bits) : 0;
  }
  // The number of bits below a digit; the last digit may be narrower than the others.
  __device__ int bits_below(int digit) const {
    return max(number_bits - (digit + 1) * digit_bits, 0);
  }
  __device__ std::uint64_t number_of(std::uint32_t code, int position) const {
    return static_cast<std::uint64_t>(code) << position_bits | static_cast<std::uint64_t>(position);
  }
  __device__ std::uint64_t number(int row, int position) const {
    return number_of(keys.code(first_row + row, position), position);
  }
  __device__ std::uint32_t* histogram(int digit, int row) const {
    return histograms + (static_cast<std::int64_t>(digit) * rows + row) * bins;
  }
  __host__ __device__ int ctas_per_row() const { return ceil_div(seqlen_k, cta_keys); }
};

// The rows of a batch of at most `batch_rows` rows, whose counts are in the workspace.
RadixRows lay_out(const SelectionArgs& args, int batch_rows, WorkspaceAllocator& workspace);

// The most queries of a chunk.
inline constexpr int most_chunk = 64;

// Rows that are few enough to have a cluster of blocks each (global_cluster.cu).
struct ClusterRows {
  RadixRows rows;
  int blocks = 0;  // blocks of a cluster
  // The number of queries whose own keys follow these keys, and that each see the w best keys of their past; 0 for one
  // selection for all queries.
  int chunk = 0;

  __device__ KeyInterval* intervals_row(int row) const {
    return rows.intervals +
           static_cast<std::int64_t>(rows.first_row + row) * (rows.seqlen_k + chunk);
  }
};

// The number of blocks of the cluster for a row of `seqlen_k` keys; 0 if the rows are too many or too long, or the GPU
// has no clusters.
int cluster_blocks(int rows, int seqlen_k);

// Writes the intervals that select_best writes; it also supports a chunk of fewer than w queries.
void select_in_clusters(const ClusterRows& rows, cudaStream_t stream);

// Writes the intervals of a batch, in which the w best keys that may be chosen are visible.
void select_best(const RadixRows& rows, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::global
