#pragma once

#include "cuda/common/score.cuh"
#include "cuda/sm80/row_order.cuh"
#include "cuda/sm80/score_tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// A tile of 16-bit biases in shared memory, [Rows][N]. The 8 lanes of a step of a 16-byte load have
// four chunks each of two neighbouring rows, which have to lie in different banks.
template <int Rows, int N>
struct BiasTile {
  static constexpr int chunks = N / 8;
  static constexpr int row_bytes = N * 2;
  static constexpr int bytes = Rows * row_bytes;

  static __device__ std::uint32_t offset(int row, int chunk) {
    const int swizzle = chunks == 8 ? row % 2 * 4 : 0;
    return static_cast<std::uint32_t>(row * row_bytes + ((chunk ^ swizzle) << 4));
  }
};

// The mask of a tile in shared memory: of each query the bits of 64 keys.
struct MaskBits {
  static constexpr std::uint32_t row_bytes = 8;

  // Of eight neighbouring keys, number `eight` of a query.
  static __device__ std::uint32_t offset(int query, int eight) {
    return static_cast<std::uint32_t>(query) * row_bytes + static_cast<std::uint32_t>(eight);
  }
};

// What the mask and the bias do to a warp's scores, M16 x 16 rows x the N keys of a tile in EightByLane
// order: of each query of a lane and 32 keys a byte of the mask and 16 bytes of the bias, which are read
// once for both heads of an Order of two.
template <class T, int M16, int N, class Order>
class PairTile {
 public:
  using Scores = float[M16][N / 8][4];

  // Shared addresses of the tiles, that of the mask at its first key of query 0; the first query.
  __device__ PairTile(std::uint32_t bias, std::uint32_t mask, int first_query) {
    const int lane = lane_id();
    const int query = first_query + lane / 4;
    bias_ = bias + Bias::offset(query, lane % 4);
    mask_ = mask + MaskBits::offset(query, lane % 4);
  }

  // x = factor x + bias; -inf where the bias masks, and where the mask does if the tile is `Masked`.
  template <bool Masked>
  __device__ void add_bias(float factor, std::uint32_t mask_values, Scores& x) const {
    for_each_eight([&](int r, int j) {
      const uint4 four = load_shared_16((bias_ ^ static_cast<std::uint32_t>(64 * j)) +
                                        static_cast<std::uint32_t>(r * 8 * Bias::row_bytes));
      const std::uint32_t word[4] = {four.x, four.y, four.z, four.w};
      const std::uint32_t bits = Masked ? load_bits(r, j) : 0xff;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 bias = Element<T>::widen_pair(hide_masking_biases<T>(word[i], mask_values));
        if ((bits >> (2 * i) & 1) == 0) bias.x = negative_infinity;
        if ((bits >> (2 * i + 1) & 1) == 0) bias.y = negative_infinity;
        for_each_head(x, r, 4 * j + i, [&](float& low, float& high) {
          low = fmaf(low, factor, bias.x);
          high = fmaf(high, factor, bias.y);
        });
      }
    });
  }

  // -inf where masked.
  __device__ void mask(Scores& x) const {
    for_each_eight([&](int r, int j) {
      const std::uint32_t bits = load_bits(r, j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        for_each_head(x, r, 4 * j + i, [&](float& low, float& high) {
          if ((bits >> (2 * i) & 1) == 0) low = negative_infinity;
          if ((bits >> (2 * i + 1) & 1) == 0) high = negative_infinity;
        });
      }
    });
  }

 private:
  static constexpr int queries = 2 * M16 / Order::heads;  // of a lane, 8 apart
  static constexpr int words = N / 32;
  static_assert(words <= 2);
  using Bias = BiasTile<8 * queries, N>;

  // Of the lane's query r, the eight of its keys [32 j, 32 j + 32).
  __device__ std::uint32_t load_bits(int r, int j) const {
    return load_shared_1(mask_ + static_cast<std::uint32_t>(r * 8 * MaskBits::row_bytes + 4 * j));
  }

  // Calls body(r, j) for the lane's queries r and keys [32 j, 32 j + 32), of which it has eight.
  template <class Body>
  __device__ static void for_each_eight(const Body& body) {
#pragma unroll
    for (int r = 0; r < queries; ++r) {
#pragma unroll
      for (int j = 0; j < words; ++j) body(r, j);
    }
  }

  // Calls body(the scores of two neighbouring keys) for the heads of query r.
  template <class Body>
  static __device__ void for_each_head(Scores& x, int r, int n, const Body& body) {
#pragma unroll
    for (int head = 0; head < Order::heads; ++head) {
      const int half = r * Order::heads + head;  // 8 rows
      float (&pair)[4] = x[half / 2][n];
      body(pair[half % 2 * 2], pair[half % 2 * 2 + 1]);
    }
  }

  std::uint32_t bias_;
  std::uint32_t mask_;
};

}  // namespace flash_dmattn::cuda::sm80
