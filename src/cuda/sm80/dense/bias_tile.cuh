#pragma once

#include <cstdint>

namespace flash_dmattn::cuda::sm80 {

// A tile of 16-bit biases in shared memory, [Rows][N], as lines of 128 bytes that begin at multiples of 128. A line has
// one row of 64 keys or two of 32. Chunks of 16 bytes that lanes read at the same time are in different banks:
//   8 lanes, 16 bytes each: half of each of two rows of 64, or two rows of 32
//   16 lanes, 8 bytes each: a quarter of each of four lines
template <int Rows, int N>
struct BiasTile {
  static_assert(N == 32 || N == 64);
  static constexpr int chunks = N / 8;
  static constexpr int row_bytes = N * 2;
  static constexpr int bytes = Rows * row_bytes;

  static __device__ std::uint32_t offset(int row, int chunk) {
    constexpr int line_rows = 64 / N;
    const int line = row / line_rows;
    const int swizzle = N == 64 ? line % 2 * 4 : line % 4 * 2;
    return static_cast<std::uint32_t>(line * 128 +
                                      (((row % line_rows * chunks + chunk) ^ swizzle) << 4));
  }
};

}  // namespace flash_dmattn::cuda::sm80
