#pragma once

#include "cuda/attention/scheduler.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/sm80/backward/query_tile_iterator.cuh"
#include "cuda/sm80/dense/bias_tile.cuh"
#include "cuda/sm80/tile/fragment.cuh"

// Masks and biases with a query dimension for kernels whose scores are transposed, [keys, queries].
namespace flash_dmattn::cuda::sm80 {

// Applies a dense mask and a dense bias to the scores of a warp, 32 keys x 64 queries in LaneContiguous<4> order. A
// lane has four neighbouring keys, and queries 8 n + 2 (l % 4) + {0, 1} of a tile. Elements of a bias are aligned by
// fours, and the number of keys is a multiple of four.
template <class T>
class DenseScores {
 public:
  static constexpr int n8 = 8;
  using Bias = BiasTile<8 * n8, 32>;  // a warp's [queries][keys]
  using Scores = float[2][n8][4];

  // `first_key` is the first key of the lane's warp.
  __device__ DenseScores(const ScoreParams& score, const Shape& shape, const KeyTile& tile,
                         int first_key)
      : score_(score),
        shape_(shape),
        tile_(tile),
        lane_(lane_id()),
        warp_key_(first_key),
        query_(lane_ % 4 * 2) {}

  // Loads the mask of the tile that is computed next. A lane has the bits of queries l and l + 32 for the warp's 32
  // keys.
  __device__ void load_mask(QueryTilePosition at) {
    if (!at.masked) return;
    const int word = (warp_key_ - tile_.key) / PackedMask::side;
    const auto* const from =
        reinterpret_cast<const std::uint32_t*>(mask_tile(at) + word * PackedMask::side + lane_) +
        warp_key_ / 32 % 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) mask_[i] = warp_key_ < shape_.seqlen_k ? __ldg(from + 64 * i) : 0;
  }

  // Starts copies of the biases of a tile to the warp's own bytes `to`.
  __device__ void copy_bias(QueryTilePosition at, std::uint32_t to) const {
    if (!score_.bias.dense) return;
    const int row = lane_ / 4;
    const int chunk = lane_ % 4;
    const std::int64_t step = 2 * score_.bias.query;
    const std::byte* const from =
        score_.bias.data + 2 * (bias_index(at) + warp_key_ + 8 * chunk) + row * step;
    to += Bias::offset(row, chunk);
    const auto address = [&](int i) {
      return to + static_cast<std::uint32_t>(i * 8 * Bias::row_bytes);
    };
    if (score_.bias.aligned_16B && at.row + 8 * n8 <= shape_.seqlen_q &&
        warp_key_ + 32 <= shape_.seqlen_k) {
#pragma unroll
      for (int i = 0; i < n8; ++i) cp_async_16(address(i), from + 8 * i * step);
      return;
    }
    const int left = shape_.seqlen_k - warp_key_ - 8 * chunk;
#pragma unroll 1
    for (int i = 0; i < n8; ++i) {
      const bool exists = at.row + row + 8 * i < shape_.seqlen_q;
      const std::byte* const source = exists && left > 0 ? from + 8 * i * step : score_.bias.data;
      cp_async_8(address(i), source, exists && left > 0);
      cp_async_8(address(i) + 8, left > 4 ? source + 8 : source, exists && left > 4);
    }
  }

  // x = scale x + bias (or x without a dense bias), -inf where masked. The bias is in shared memory at `bias`, whose
  // bytes are free afterwards.
  __device__ void apply(QueryTilePosition at, std::uint32_t bias, Scores& x) const {
    if (score_.bias.dense) {
      cp_async_wait_all();
      __syncwarp();
      const std::uint32_t mask_values = packed_mask_value<T>(score_);
#pragma unroll
      for (int n = 0; n < n8; ++n) add_bias(bias, mask_values, n, x);
      __syncwarp();
    }
    if (at.masked) {
#pragma unroll
      for (int n = 0; n < n8; ++n) mask(n, x);
    }
  }

 private:
  __device__ std::int64_t bias_index(QueryTilePosition at) const {
    return score_.bias.begin(tile_.batch, at.head, tile_.kv_head) + at.row * score_.bias.query;
  }

  // The address of row 0 of a tile in the first of the block's two words.
  __device__ const std::uint64_t* mask_tile(QueryTilePosition at) const {
    const PackedMask& mask = score_.packed_mask;
    const int row_tiles = ceil_div(shape_.seqlen_q, PackedMask::side);
    const std::int64_t matrix = mask.matrix(tile_.batch, at.head, tile_.kv_head);
    const std::int64_t tile = (matrix * row_tiles + at.row / PackedMask::side) * mask.words +
                              tile_.key / PackedMask::side;
    return mask.bits + tile * PackedMask::side;
  }

  // Adds the bias of block n of columns.
  __device__ void add_bias(std::uint32_t bias, std::uint32_t mask_values, int n, Scores& x) const {
    const float factor = score_.dense_factor;
    const std::uint32_t from = bias + Bias::offset(query_, lane_ / 8) + lane_ / 4 % 2 * 8;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint2 four_keys = load_shared_8((from ^ static_cast<std::uint32_t>(64 * e)) +
                                            static_cast<std::uint32_t>(n * 8 * Bias::row_bytes));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float2 key_biases = Element<T>::widen_packed2(
            hide_masking_biases<T>(m == 0 ? four_keys.x : four_keys.y, mask_values));
        x[m][n][e] = fmaf(x[m][n][e], factor, key_biases.x);
        x[m][n][2 + e] = fmaf(x[m][n][2 + e], factor, key_biases.y);
      }
    }
  }

  __device__ void mask(int n, Scores& x) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const std::uint32_t bits = shuffle(mask_[n / 4], 8 * (n % 4) + query_ + e) >> (lane_ / 4 * 4);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if ((bits >> (2 * m + h) & 1) == 0) x[m][n][2 * h + e] = negative_infinity;
        }
      }
    }
  }

  const ScoreParams& score_;
  const Shape& shape_;
  KeyTile tile_;
  int lane_;
  int warp_key_;
  int query_;
  std::uint32_t mask_[2];
};

}  // namespace flash_dmattn::cuda::sm80
