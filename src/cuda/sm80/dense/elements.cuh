#pragma once

#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/scheduler.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/sm80/tile/fragment.cuh"

namespace flash_dmattn::cuda {

// Reads dense masks and biases element by element.
template <class T, class Positions>
class DenseElements {
 public:
  // `keys` are the TilePositions of the tile, of which `size` exist.
  __device__ DenseElements(const ScoreParams& score, const QueryTile& tile, int seqlen_q, int size,
                           const Positions& keys)
      : score_(score), keys_(keys), last_row_(seqlen_q - 1), size_(size) {
    const auto begin = [&](const Broadcast& b) {
      return b.begin(tile.batch, tile.head, tile.kv_head);
    };
    mask_ = begin(score.mask);
    bias_ = begin(score.bias);
  }

  // x = scale x + bias (or x without a dense bias), -inf where masked. Elements that the key info hides are not read.
  // `partial` is the state of the key info, which may be missing if `partial` is false.
  template <int M16, int N8, class KeyInfo>
  __device__ void apply(const KeyInfo& key_info, bool partial, LanePosition position,
                        float (&x)[M16][N8][4]) const {
    for_each_element(x, [&](float& s, int m, int n, int e) {
      const int row = position.row + 16 * m + 8 * (e / 2);
      const int column = position.column + 8 * n + e % 2;
      // mask_columns masks the elements that the key info hides.
      const bool exists = row <= last_row_;
      if (exists && (!partial || key_info.range[column].sees(row))) apply_element(row, column, s);
    });
  }

  // `apply` for a tile of consecutive existing keys with aligned_x2 elements. It loads the elements of 16 rows in pairs
  // without branches, so that all loads are in flight before the first value is used.
  template <int M16, int N8, class KeyInfo>
  __device__ void apply_x2(const KeyInfo& key_info, bool partial, LanePosition position,
                           float (&x)[M16][N8][4]) const {
    const bool aligned_x2 = !keys_.listed() && size_ == KeyInfo::size &&
                            (!score_.mask.dense || score_.mask.aligned_x2) &&
                            (!score_.bias.dense || (score_.bias.aligned_x2 && !score_.bias.f32));
    if (!aligned_x2) {
      apply(key_info, partial, position, x);
      return;
    }
#pragma unroll
    for (int m = 0; m < M16; ++m) apply_rows_x2(position.row + 16 * m, position.column, x[m]);
  }

 private:
  template <int N8>
  __device__ void apply_rows_x2(int first_row, int column, float (&x)[N8][4]) const {
    std::uint32_t mask[2][N8];
    std::uint32_t bias[2][N8];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Rows past the end read the last row; their results are not stored.
      const std::int64_t row = min(first_row + 8 * h, last_row_);
      const std::int64_t key = keys_[0] + column;
      const auto* masks = reinterpret_cast<const std::uint16_t*>(
          reinterpret_cast<const std::uint8_t*>(score_.mask.data) + mask_ +
          row * score_.mask.query + key);
      const auto* biases = reinterpret_cast<const std::uint32_t*>(
          score_.bias.data + 2 * (bias_ + row * score_.bias.query + key));
#pragma unroll
      for (int n = 0; n < N8; ++n) mask[h][n] = score_.mask.dense ? __ldg(masks + 4 * n) : 0x0101u;
#pragma unroll
      for (int n = 0; n < N8; ++n) bias[h][n] = score_.bias.dense ? __ldg(biases + 4 * n) : 0;
    }
#pragma unroll
    for (int n = 0; n < N8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const std::uint32_t word = bias[e / 2][n];
        const auto two = reinterpret_cast<const typename Element<T>::Packed2&>(word);
        const std::uint32_t byte = e % 2 == 0 ? 0xffu : 0xff00u;
        add(Element<T>::widen(e % 2 == 0 ? two.x : two.y), (mask[e / 2][n] & byte) != 0, x[n][e]);
      }
    }
  }

  __device__ void apply_element(std::int64_t row, int column, float& s) const {
    const std::int64_t key = keys_[column];
    bool visible = true;
    if (score_.mask.dense) {
      visible = reinterpret_cast<const std::uint8_t*>(
                    score_.mask.data)[mask_ + row * score_.mask.query + key * score_.mask.key] != 0;
    }
    float bias = 0;
    if (score_.bias.dense && visible) {
      bias = load_bias<T>(score_.bias, bias_ + row * score_.bias.query + key * score_.bias.key);
    }
    add(bias, visible, s);
  }

  __device__ void add(float bias, bool visible, float& s) const {
    if (score_.bias.dense) {
      visible = visible && bias > score_.mask_value;
      s = fmaf(s, score_.dense_factor, bias);
    }
    if (!visible) s = negative_infinity;
  }

  const ScoreParams& score_;
  Positions keys_;
  std::int64_t mask_;
  std::int64_t bias_;
  int last_row_;
  int size_;
};

}  // namespace flash_dmattn::cuda
