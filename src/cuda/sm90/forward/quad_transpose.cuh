#pragma once

#include <cstdint>

#include "cuda/primitives/warp.cuh"

namespace flash_dmattn::cuda::sm90 {

// Transposes 4 x 4 words among the four lanes of a quad: word j of lane i becomes word i of lane j.
__device__ inline void transpose_in_quad(std::uint32_t (&x)[4]) {
  const bool odd = (threadIdx.x & 1) != 0;
  const bool high = (threadIdx.x & 2) != 0;
  const std::uint32_t a = shuffle_xor(odd ? x[0] : x[1], 1);
  const std::uint32_t b = shuffle_xor(odd ? x[2] : x[3], 1);
  x[0] = odd ? a : x[0];
  x[1] = odd ? x[1] : a;
  x[2] = odd ? b : x[2];
  x[3] = odd ? x[3] : b;
  const std::uint32_t c = shuffle_xor(high ? x[0] : x[2], 2);
  const std::uint32_t d = shuffle_xor(high ? x[1] : x[3], 2);
  x[0] = high ? c : x[0];
  x[2] = high ? x[2] : c;
  x[1] = high ? d : x[1];
  x[3] = high ? x[3] : d;
}

}  // namespace flash_dmattn::cuda::sm90
