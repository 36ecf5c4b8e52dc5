#pragma once

#include <cstdint>

#include "cuda/attention/params.h"

namespace flash_dmattn::cuda::sm90 {

enum class KeyGradient : std::uint8_t { dk, dv };

// A thread's sums of a gradient of its two keys, N / 2 columns of each, in the order of accumulators.
template <KeyGradient Which, int N>
struct GradientSums {
  static constexpr KeyGradient which = Which;
  static constexpr bool is_dk = Which == KeyGradient::dk;
  static constexpr int columns = 2 * N;

  float (&sums)[N];

  __device__ static const OutputRows& rows(const BackwardParams& p) { return is_dk ? p.dk : p.dv; }
  // The columns that exist in memory.
  __device__ static int existing_columns(const Shape& shape) {
    return is_dk ? shape.head_dim : shape.value_dim;
  }
  // The factor from sums to the gradient.
  __device__ static float scale(const BackwardParams& p) { return is_dk ? p.score.scale : 1; }
};

}  // namespace flash_dmattn::cuda::sm90
