#pragma once

#include "cuda/attention/scheduler.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/tile/tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// Adds to the rows of dk and dv in memory that belong to a key tile of the query-major backward. It has the offsets of
// the rows of a lane's accumulators. WarpTile is the warp's part of [keys, D].
template <class T, int D, class WarpTile, class Scores, class QueryRows>
class DkvAccumulator {
 public:
  // key_of(r) returns the key of row r of the tile, whose first `size` keys exist.
  template <class KeyOf>
  __device__ DkvAccumulator(const QueryMajorParams& p, const QueryTile& tile, int size,
                            const KeyOf& key_of)
      : columns_(accum_columns(p.shape.head_dim)), full_(size >= Scores::columns && columns_ == D) {
    const int lane = lane_id();
    const std::int64_t head =
        (static_cast<std::int64_t>(tile.batch) * p.shape.heads_kv + tile.kv_head) *
            p.shape.seqlen_k * columns_ +
        WarpTile::column() + 4 * (lane % 4);
#pragma unroll
    for (int m = 0; m < m16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = WarpTile::row() + 16 * m + 8 * h + lane / 4;
        exists_[m][h] = row < size;
        offset_[m][h] = head + static_cast<std::int64_t>(key_of(row)) * columns_;
      }
    }
  }

  // Adds left^T right, of shared tiles [queries, keys] and [queries, D], to `sums`; does nothing if `sums` is null.
  __device__ void add(float* sums, std::uint32_t left, std::uint32_t right) const {
    if (sums == nullptr) return;
    typename WarpTile::Accumulators c;
    clear(c);
    multiply<T, QueryRows::rows>(c, OperandA<Scores, Major::mn>(left, WarpTile::row()),
                                 OperandB<QueryRows, Major::mn>(right, WarpTile::column()));
    full_ ? reduce<true>(sums, c) : reduce<false>(sums, c);
  }

 private:
  static constexpr int m16 = WarpTile::m / 16;

  // With `Full`, all rows and columns exist. Without branches, the moves that prepare the operands of one addition do
  // not wait until the previous addition has read its operands.
  template <bool Full>
  __device__ void reduce(float* sums, const typename WarpTile::Accumulators& c) const {
#pragma unroll
    for (int m = 0; m < m16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (!Full && !exists_[m][h]) continue;
        float* const to = sums + offset_[m][h];
#pragma unroll
        for (int d = 0; d < WarpTile::n / 8; d += 2) {
          // A lane's four columns of two accumulator blocks are adjacent in the sums.
          if (Full || WarpTile::column() + 8 * d < columns_) {
            reduce_add(to + 8 * d, c[m][d][2 * h], c[m][d][2 * h + 1], c[m][d + 1][2 * h],
                       c[m][d + 1][2 * h + 1]);
          }
        }
      }
    }
  }

  std::int64_t offset_[m16][2];
  bool exists_[m16][2];
  int columns_;
  bool full_;
};

}  // namespace flash_dmattn::cuda::sm80
