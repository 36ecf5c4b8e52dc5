#pragma once

#include <cstdint>

#include "cuda/attention/params.h"

namespace flash_dmattn::cuda {

// The elements of a row of a head.
template <class T>
__device__ inline const T* row_of(const InputRows& rows, std::int64_t batch, std::int64_t row,
                                  std::int64_t head) {
  return reinterpret_cast<const T*>(rows.data + batch * rows.batch + row * rows.row +
                                    head * rows.head);
}
template <class T>
__device__ inline T* row_of(const OutputRows& rows, std::int64_t batch, std::int64_t row,
                            std::int64_t head) {
  return reinterpret_cast<T*>(rows.data + batch * rows.batch + row * rows.row + head * rows.head);
}

}  // namespace flash_dmattn::cuda
