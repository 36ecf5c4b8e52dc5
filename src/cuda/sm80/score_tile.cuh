#pragma once

#include "cuda/common/scheduler.cuh"
#include "cuda/common/score.cuh"
#include "cuda/sm80/row_order.cuh"
#include "cuda/sm80/tile.cuh"

// The score policy on a warp's accumulators: element (m, n, e) of a lane is the pair of query
// row + 16 m + 8 (e / 2) and column + 8 n + e % 2 of the key tile.
namespace flash_dmattn::cuda::sm80 {

struct LanePosition {
  int row;     // query of element (0, 0, 0)
  int column;  // its column in the key tile

  // For a warp whose accumulators begin at query `row`, column `column`.
  static __device__ LanePosition of(int warp_row, int warp_column) {
    const int lane = lane_id();
    return {warp_row + lane / 4, warp_column + 2 * (lane % 4)};
  }
};

// Calls body(element, m, n, e).
template <int M16, int N8, class Body>
__device__ inline void for_each_element(float (&x)[M16][N8][4], const Body& body) {
#pragma unroll
  for (int m = 0; m < M16; ++m) {
#pragma unroll
    for (int n = 0; n < N8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) body(x[m][n][e], m, n, e);
    }
  }
}

// Everything that comes before the bias.
template <int M16, int N8>
__device__ inline void shape_scores(const ScoreParams& score, float (&x)[M16][N8][4]) {
  if (score.form == ScoreForm::product) return;
  if (score.form == ScoreForm::capped) {
    for_each_element(x, [&](float& s, int, int, int) { s = tanh_from_log2(s * score.inner); });
  } else {
    for_each_element(x, [&](float& s, int, int, int) { s *= score.inner; });
  }
}

// s = factor x + bias of the column.
template <int M16, int N8, class Columns>
__device__ inline void add_column_bias(float factor, const Columns& columns, LanePosition position,
                                       float (&x)[M16][N8][4]) {
#pragma unroll
  for (int n = 0; n < N8; ++n) {
    const float2 bias = *reinterpret_cast<const float2*>(&columns.bias[position.column + 8 * n]);
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        x[m][n][e] = fmaf(x[m][n][e], factor, e % 2 == 0 ? bias.x : bias.y);
    }
  }
}

// -inf where the column does not see the row.
template <class Order = RowOrder<1>, int M16, int N8, class Columns>
__device__ inline void mask_columns(const Columns& columns, LanePosition position,
                                    float (&x)[M16][N8][4]) {
#pragma unroll
  for (int n = 0; n < N8; ++n) {
    const int4 pair = *reinterpret_cast<const int4*>(&columns.range[position.column + 8 * n]);
    const ColumnRange range[2] = {{pair.x, pair.y}, {pair.z, pair.w}};
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = position.row + Order::query(16 * m + 8 * (e / 2));
        if (!range[e % 2].sees(row)) x[m][n][e] = negative_infinity;
      }
    }
  }
}

// Masks and biases with a query dimension. In a tile of consecutive keys that all exist, whose
// elements lie in_pairs, the elements of 16 rows are loaded two at a time and without a branch, so
// that all are on their way before the first is used; other tiles read what their columns can see
// one by one.
template <class T>
class PairScores {
 public:
  // `size`: keys of the tile that exist.
  __device__ PairScores(const ScoreParams& score, const QueryTile& tile, int seqlen_q,
                        bool consecutive, int size, const int* keys)
      : score_(score),
        keys_(keys),
        last_row_(seqlen_q - 1),
        consecutive_(consecutive),
        size_(size) {
    const auto begin = [&](const Broadcast& b) {
      return tile.batch * b.batch + tile.head * b.head_q + tile.kv_head * b.head_kv;
    };
    mask_ = begin(score.mask);
    bias_ = begin(score.bias);
    key_rank_ = begin(score.key_rank);
    rank_limit_ = begin(score.rank_limit);
  }

  // x = scale x + bias (x without a bias of pairs), -inf where masked. `partial`: of the columns, which
  // are not there otherwise.
  template <int M16, int N8, class Columns>
  __device__ void apply(const Columns& columns, bool partial, LanePosition position,
                        float (&x)[M16][N8][4]) const {
    const bool in_pairs = consecutive_ && size_ == Columns::size &&
                          (!score_.mask.per_query || score_.mask.in_pairs) &&
                          (!score_.bias.per_query || (score_.bias.in_pairs && !score_.bias.f32));
    if (in_pairs) {
#pragma unroll
      for (int m = 0; m < M16; ++m) apply_pairs(position.row + 16 * m, position.column, x[m]);
    } else {
      for_each_element(x, [&](float& s, int m, int n, int e) {
        const int row = position.row + 16 * m + 8 * (e / 2);
        const int column = position.column + 8 * n + e % 2;
        // Where the column does not see the row, mask_columns will see to it.
        const bool exists = row <= last_row_;
        if (exists && (!partial || columns.range[column].sees(row))) apply_element(row, column, s);
      });
    }
    if (score_.key_rank.data == nullptr) return;
    const auto* ranks = reinterpret_cast<const int*>(score_.key_rank.data) + key_rank_;
    const auto* limits = reinterpret_cast<const int*>(score_.rank_limit.data) + rank_limit_;
    for_each_element(x, [&](float& s, int m, int n, int e) {
      const std::int64_t row = position.row + 16 * m + 8 * (e / 2);
      const int column = position.column + 8 * n + e % 2;
      const bool exists = row <= last_row_ && column < size_;
      if (exists && __ldg(ranks + keys_[column]) >= __ldg(limits + row * score_.rank_limit.query)) {
        s = negative_infinity;
      }
    });
  }

 private:
  template <int N8>
  __device__ void apply_pairs(int first_row, int column, float (&x)[N8][4]) const {
    std::uint32_t mask[2][N8];
    std::uint32_t bias[2][N8];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Rows past the end read the last one; their results are not stored.
      const std::int64_t row = min(first_row + 8 * h, last_row_);
      const std::int64_t key = keys_[0] + column;
      const auto* masks = reinterpret_cast<const std::uint16_t*>(
          reinterpret_cast<const std::uint8_t*>(score_.mask.data) + mask_ +
          row * score_.mask.query + key);
      const auto* biases = reinterpret_cast<const std::uint32_t*>(
          score_.bias.data + 2 * (bias_ + row * score_.bias.query + key));
#pragma unroll
      for (int n = 0; n < N8; ++n)
        mask[h][n] = score_.mask.per_query ? __ldg(masks + 4 * n) : 0x0101u;
#pragma unroll
      for (int n = 0; n < N8; ++n) bias[h][n] = score_.bias.per_query ? __ldg(biases + 4 * n) : 0;
    }
#pragma unroll
    for (int n = 0; n < N8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const std::uint32_t word = bias[e / 2][n];
        const auto pair = reinterpret_cast<const typename Element<T>::Pair&>(word);
        const std::uint32_t byte = e % 2 == 0 ? 0xffu : 0xff00u;
        add(Element<T>::widen(e % 2 == 0 ? pair.x : pair.y), (mask[e / 2][n] & byte) != 0, x[n][e]);
      }
    }
  }

  __device__ void apply_element(std::int64_t row, int column, float& s) const {
    const std::int64_t key = keys_[column];
    bool visible = true;
    if (score_.mask.per_query) {
      visible = reinterpret_cast<const std::uint8_t*>(
                    score_.mask.data)[mask_ + row * score_.mask.query + key * score_.mask.key] != 0;
    }
    float bias = 0;
    if (score_.bias.per_query && visible) {
      bias = load_bias<T>(score_.bias, bias_ + row * score_.bias.query + key * score_.bias.key);
    }
    add(bias, visible, s);
  }

  __device__ void add(float bias, bool visible, float& s) const {
    if (score_.bias.per_query) {
      visible = visible && bias > score_.mask_value;
      s = fmaf(s, score_.pair_factor, bias);
    }
    if (!visible) s = negative_infinity;
  }

  const ScoreParams& score_;
  const int* keys_;
  std::int64_t mask_;
  std::int64_t bias_;
  std::int64_t key_rank_;
  std::int64_t rank_limit_;
  int last_row_;
  bool consecutive_;
  int size_;
};

}  // namespace flash_dmattn::cuda::sm80
