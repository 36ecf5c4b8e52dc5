#pragma once

namespace flash_dmattn::cuda {

// The rows of a query tile are the same queries of `Heads` neighbouring heads. With two heads, eight queries of one and
// of the other alternate, so that a lane's rows 16 m + l / 4 and 16 m + 8 + l / 4 of a fragment are the same query. A
// dense mask and bias are then read once for both.
template <int Heads>
struct RowOrder {
  static_assert(Heads == 1 || Heads == 2);
  static constexpr int heads = Heads;

  static __device__ constexpr int head(int row) { return Heads == 1 ? 0 : row / 8 % 2; }
  static __device__ constexpr int query(int row) {
    return Heads == 1 ? row : row / 16 * 8 + row % 8;
  }
};

}  // namespace flash_dmattn::cuda
