#pragma once

#include "cuda/sm90/prepare_key_info.cuh"

namespace flash_dmattn::cuda::sm90 {

// Computes the KeyInfo of a forward, and clears its work counters and its flags, if it has them.
template <class T>
struct PrepareForward {
  PrepareKeyInfo<T> key_info;
  int* next_work;
  std::uint32_t* needs_fix;
  std::uint32_t* has_large_rows;

  long items() const { return std::max(key_info.items(), next_work == nullptr ? 0l : 1l); }

  __device__ void operator()(long i) const {
    if (i == 0 && next_work != nullptr) {
      next_work[0] = next_work[1] = 0;
      *needs_fix = 0;
      if (has_large_rows != nullptr) *has_large_rows = 0;
    }
    key_info(i);
  }
};

}  // namespace flash_dmattn::cuda::sm90
