#pragma once

#include "cuda/attention/bias_gradient.cuh"
#include "cuda/attention/scheduler.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/tile/column_sums.cuh"
#include "cuda/sm80/tile/fragment.cuh"

namespace flash_dmattn::cuda::sm80 {

// The gradient of a bias in the query-major backward, from the dS of a warp's part of a score tile, which is a
// WarpTile. With `HasDense`, the bias may have a query dimension. With `Ordered`, warps that add to the same elements
// do it one after another.
template <class T, class WarpTile, bool HasDense, bool Ordered>
class QueryMajorBiasGradient {
 public:
  using Accumulators = typename WarpTile::Accumulators;

  __device__ QueryMajorBiasGradient(const QueryMajorParams& p, const QueryTile& tile)
      : p_(p), tile_(tile) {}

  __device__ bool wanted() const { return p_.dbias.data != nullptr; }

  // Adds the gradient of a tile of `size` keys; keys[i] is the key of column i.
  template <class Keys>
  __device__ void add(const Keys& keys, int size, const Accumulators& ds) const {
    if (HasDense && p_.dbias.dense) {
      p_.dbias.key == 0 && p_.dbias_accumulates ? add_row_sums(ds) : store_elements(keys, size, ds);
    } else {
      add_column_sums(keys, size, ds);
    }
  }

  // Stores zeros for keys [begin, end) of a dense bias and the block's rows, where no tile is computed.
  __device__ void clear(int row_end, int warps, int begin, int end) const {
    if constexpr (HasDense) {
      if (!wanted() || !p_.dbias.dense || p_.dbias_accumulates || p_.tile_lists.keys != nullptr)
        return;
      for (int row = tile_.row + warp_id(); row < row_end; row += warps) {
        for (int key = begin + lane_id(); key < end; key += warp_size) {
          store_gradient<T>(p_.dbias, head_begin() + row * p_.dbias.query + key * p_.dbias.key, 0,
                            false, true);
        }
      }
    }
  }

 private:
  static constexpr int m16 = WarpTile::m / 16;
  static constexpr int n8 = WarpTile::n / 8;

  // Calls body() in all warps. If order matters, warps with number 0 call it first, then 1, ... `count` - 1.
  template <class Body>
  static __device__ void one_by_one(int number, int count, const Body& body) {
#pragma unroll 1
    for (int i = 0; i < (Ordered ? count : 1); ++i) {
      if (!Ordered || i == number) body();
      if (Ordered) __syncthreads();
    }
  }

  // The positions are recomputed at each use, because the main loop has no registers for them.
  __device__ LanePosition position() const {
    return LanePosition::of(tile_.row + WarpTile::row(), WarpTile::column());
  }
  // The index of the head's first element.
  __device__ std::int64_t head_begin() const {
    return p_.dbias.begin(tile_.batch, tile_.head, tile_.kv_head);
  }
  __device__ float* sums() const { return reinterpret_cast<float*>(p_.dbias.data) + head_begin(); }

  // Adds the gradient of a key bias.
  template <class Keys>
  __device__ void add_column_sums(const Keys& keys, int size, const Accumulators& ds) const {
    const ColumnSums<m16, n8> column_sums(ds);
    one_by_one(WarpTile::grid_row(), WarpTile::grid_rows, [&] {
#pragma unroll
      for (int i = 0; i < column_sums.size; ++i) {
        const int column = position().column + column_sums.column(i);
        if (column_sums.is_owner() && column < size && column_sums[i] != 0)
          atomicAdd(sums() + keys[column] * p_.dbias.key, column_sums[i]);
      }
    });
  }

  // Adds the gradient of a bias that all keys of a query share.
  __device__ void add_row_sums(const Accumulators& ds) const {
    float row_sums[m16][2];
#pragma unroll
    for (int m = 0; m < m16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_sums[m][h] = 0;
#pragma unroll
        for (int n = 0; n < n8; ++n) row_sums[m][h] += ds[m][n][2 * h] + ds[m][n][2 * h + 1];
        row_sums[m][h] = quad_sum(row_sums[m][h]);
      }
    }
    one_by_one(WarpTile::grid_column(), WarpTile::grid_columns, [&] {
#pragma unroll
      for (int m = 0; m < m16; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = position().row + 16 * m + 8 * h;
          if (lane_id() % 4 == 0 && row < p_.shape.seqlen_q && row_sums[m][h] != 0)
            atomicAdd(sums() + row * p_.dbias.query, row_sums[m][h]);
        }
      }
    });
  }

  // Stores or adds the gradient of a dense bias.
  template <class Keys>
  __device__ void store_elements(const Keys& keys, int size, const Accumulators& ds) const {
    const bool by_twos =
        p_.dbias.aligned_x2 && p_.tile_lists.keys == nullptr && !p_.dbias_accumulates;
#pragma unroll
    for (int m = 0; m < m16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = position().row + 16 * m + 8 * h;
        if (row >= p_.shape.seqlen_q) continue;
        const std::int64_t row_begin = head_begin() + row * p_.dbias.query;
#pragma unroll
        for (int n = 0; n < n8; ++n) {
          const int column = position().column + 8 * n;
          const float (&row_ds)[2] = reinterpret_cast<const float (&)[2]>(ds[m][n][2 * h]);
          if (by_twos && column + 1 < size) {
            store_gradient_x2<T>(p_.dbias, row_begin + keys[column], row_ds[0], row_ds[1],
                                 p_.saturate);
            continue;
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (column + i < size) {
              store_gradient<T>(p_.dbias, row_begin + keys[column + i] * p_.dbias.key, row_ds[i],
                                p_.dbias_accumulates, p_.saturate);
            }
          }
        }
      }
    }
  }

  const QueryMajorParams& p_;
  const QueryTile& tile_;
};

}  // namespace flash_dmattn::cuda::sm80
