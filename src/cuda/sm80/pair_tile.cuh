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

// What the mask and the bias do to a warp's scores, M16 x 16 rows x Keys of the N keys of a tile in
// EightByLane order: a byte of the packed mask and 16 bytes of the bias for each query and 32 keys of a
// lane, which are read once for both heads of an Order of two.
template <class T, int M16, int N, int Keys, class Order>
class PairTile {
 public:
  using Scores = float[M16][Keys / 8][4];

  // Shared addresses of the tiles, that of the mask at its byte of query 0; the first query and key.
  __device__ PairTile(std::uint32_t bias, std::uint32_t mask, int first_query, int first_key) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int query = first_query + lane / 4;
    const int chunk = first_key / 8 + lane % 4;
    bias_ = bias + Bias::offset(query, chunk);
    mask_ = mask + static_cast<std::uint32_t>(query * 8 + chunk);
  }

  // x = factor x + bias; -inf where the mask masks if the tile is `Masked`. Whether a bias of the lane
  // masks, too.
  template <bool Masked>
  __device__ bool add_bias(const ScoreParams& score, Scores& x) const {
    using Pair = typename Element<T>::Pair;
    const float factor = score.pair_factor;
    std::uint32_t first = 0;
    Pair least = reinterpret_cast<const Pair&>(first);
    const auto add = [&](std::uint32_t word, std::uint32_t bits, int r, int n) {
      least = __hmin2_nan(least, reinterpret_cast<const Pair&>(word));
      float2 bias = Element<T>::widen_pair(word);
      if ((bits & 1) == 0) bias.x = negative_infinity;
      if ((bits & 2) == 0) bias.y = negative_infinity;
      for_each_head(x, r, n, [&](float& low, float& high) {
        low = fmaf(low, factor, bias.x);
        high = fmaf(high, factor, bias.y);
      });
    };
    if constexpr (Masked) {
      for_each_word([&](int r, int j) { return mask_byte(r, j); }, add);
    } else {
      for_each_word(everything_visible, add);
    }
    // A NaN does.
    return !(Element<T>::widen(least.x) > score.mask_value &&
             Element<T>::widen(least.y) > score.mask_value);
  }

  // -inf where the bias masks.
  __device__ void mask_by_bias(float mask_value, Scores& x) const {
    for_each_word(everything_visible, [&](std::uint32_t word, std::uint32_t, int r, int n) {
      const float2 bias = Element<T>::widen_pair(word);
      for_each_head(x, r, n, [&](float& low, float& high) {
        if (!(bias.x > mask_value)) low = negative_infinity;
        if (!(bias.y > mask_value)) high = negative_infinity;
      });
    });
  }

  // -inf where masked.
  __device__ void mask(Scores& x) const {
#pragma unroll
    for (int r = 0; r < queries; ++r) {
#pragma unroll
      for (int j = 0; j < words; ++j) {
        const std::uint32_t bits = mask_byte(r, j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          for_each_head(x, r, 4 * j + i, [&](float& low, float& high) {
            if ((bits & 1u << 2 * i) == 0) low = negative_infinity;
            if ((bits & 2u << 2 * i) == 0) high = negative_infinity;
          });
        }
      }
    }
  }

 private:
  static constexpr int queries = 2 * M16 / Order::heads;  // of a lane, 8 apart
  static constexpr int words = Keys / 32;
  using Bias = BiasTile<8 * queries, N>;

  // Of the lane's query r, keys 32 j and further.
  __device__ std::uint32_t mask_byte(int r, int j) const {
    return load_shared_1(mask_ + static_cast<std::uint32_t>(r * 64 + 4 * j));
  }

  static __device__ std::uint32_t everything_visible(int, int) { return 0xff; }

  // Calls body(biases of two neighbouring keys, their bits, query r, n of their accumulators).
  template <class Bits, class Body>
  __device__ void for_each_word(const Bits& bits_of, const Body& body) const {
#pragma unroll
    for (int r = 0; r < queries; ++r) {
#pragma unroll
      for (int j = 0; j < words; ++j) {
        const uint4 four = load_shared_16((bias_ ^ static_cast<std::uint32_t>(64 * j)) +
                                          static_cast<std::uint32_t>(r * 8 * Bias::row_bytes));
        const std::uint32_t word[4] = {four.x, four.y, four.z, four.w};
        const std::uint32_t bits = bits_of(r, j);
#pragma unroll
        for (int i = 0; i < 4; ++i) body(word[i], bits >> 2 * i, r, 4 * j + i);
      }
    }
  }

  // Calls body(the scores of both keys) for the heads of query r.
  template <class Body>
  static __device__ void for_each_head(Scores& x, int r, int n, const Body& body) {
#pragma unroll
    for (int head = 0; head < Order::heads; ++head) {
      const int half = r * Order::heads + head;  // 8 rows
      body(x[half / 2][n][half % 2 * 2], x[half / 2][n][half % 2 * 2 + 1]);
    }
  }

  std::uint32_t bias_;
  std::uint32_t mask_;
};

}  // namespace flash_dmattn::cuda::sm80
