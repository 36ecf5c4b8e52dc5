#pragma once

#include <cstdint>

#include "cuda/primitives/ptx.cuh"

namespace flash_dmattn::cuda {

inline constexpr float log2e = 1.4426950408889634f;
inline constexpr float log2e_low = 1.92596299e-8f;  // log2 e is log2e + log2e_low
inline constexpr float negative_infinity = -__builtin_huge_valf();

// tanh(x), given 2 log2 e x. Its absolute error is 1e-7, as softcap requires; that of tanh.approx is 5e-4.
__device__ inline float tanh_from_log2(float x) { return 1 - __fdividef(2.0f, exp2_approx(x) + 1); }

// Sets the highest bit of every nonzero byte; the other bits are undefined.
__device__ inline std::uint32_t mark_nonzero_bytes(std::uint32_t four) {
  return ((four & 0x7f7f7f7fu) + 0x7f7f7f7fu) | four;
}

// 0 if both are finite, otherwise NaN.
__device__ inline float zero_if_finite(float x, float y) { return fmaf(x, 0.0f, y * 0.0f); }

}  // namespace flash_dmattn::cuda
