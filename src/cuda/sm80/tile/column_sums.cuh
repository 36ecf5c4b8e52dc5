#pragma once

#include "cuda/primitives/warp.cuh"

namespace flash_dmattn::cuda {

// The sums over rows of the columns of a warp's accumulators, [16 M16 rows, 8 N8 columns]. Eight lanes share a column.
// At each of three steps a lane sends half of its sums to another lane and keeps the rest, so that it ends with the
// sums of an eighth of its columns.
template <int M16, int N8>
class ColumnSums {
 public:
  static constexpr int size = (2 * N8 + 7) / 8;  // sums of a lane at the end

  __device__ explicit ColumnSums(const float (&x)[M16][N8][4]) {
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) {
      sums_[i] = 0;
#pragma unroll
      for (int m = 0; m < M16; ++m) sums_[i] += x[m][i / 2][i % 2] + x[m][i / 2][i % 2 + 2];
    }
    const int lane = lane_id();
    int left = lane_columns;
#pragma unroll
    for (int step = 16; step >= 4; step /= 2) {
      const bool upper = (lane & step) != 0;
      if (left > 1) {
        left /= 2;
#pragma unroll
        for (int i = 0; i < lane_columns / 2; ++i) {
          if (i >= left) break;
          const float kept = upper ? sums_[i + left] : sums_[i];
          const float handed = upper ? sums_[i] : sums_[i + left];
          sums_[i] = kept + shuffle_xor(handed, step);
        }
        first_ += upper ? left : 0;
      } else {
        sums_[0] += shuffle_xor(sums_[0], step);
      }
    }
    // If there are fewer columns than lanes, several lanes have the same sum, and one of them owns it.
    constexpr int sharing = lane_columns < 8 ? 8 / lane_columns : 1;
    owner_ = lane / 4 % sharing == 0;
  }

  __device__ float operator[](int i) const { return sums_[i]; }
  // The column of sum i, relative to the lane's first column.
  __device__ int column(int i) const { return (first_ + i) / 2 * 8 + (first_ + i) % 2; }
  __device__ bool is_owner() const { return owner_; }

 private:
  static constexpr int lane_columns = 2 * N8;

  float sums_[lane_columns];
  int first_ = 0;  // the index among the lane's columns of the column that sums_[0] belongs to
  bool owner_;
};

}  // namespace flash_dmattn::cuda
