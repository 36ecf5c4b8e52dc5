#pragma once

#include "cuda/common/score.cuh"
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

// What the mask and the bias do to a warp's score tile, M16 x 16 queries x N keys in EightByLane
// order: a byte of the packed mask and 16 bytes of the bias for each row and 32 keys of a lane.
template <class T, int M16, int N>
class PairTile {
 public:
  // Shared addresses of the tiles, that of the mask at its byte of row 0.
  __device__ PairTile(std::uint32_t bias, std::uint32_t mask, int warp_row) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = warp_row + lane / 4;
    bias_ = bias + Bias::offset(row, lane % 4);
    mask_ = mask + static_cast<std::uint32_t>(row * 8 + lane % 4);
  }

  // x = factor x + bias; -inf where the bias masks.
  template <int N8>
  __device__ void add_bias(const ScoreParams& score, float (&x)[M16][N8][4]) const {
    using Pair = typename Element<T>::Pair;
    const float factor = score.pair_factor;
    std::uint32_t first = 0;
    Pair least = reinterpret_cast<const Pair&>(first);
    for_each_word(x, [&](std::uint32_t word, float& low, float& high) {
      least = __hmin2_nan(least, reinterpret_cast<const Pair&>(word));
      const float2 bias = Element<T>::widen_pair(word);
      low = fmaf(low, factor, bias.x);
      high = fmaf(high, factor, bias.y);
    });
    // Rarely is a bias a mask, too. A NaN is one.
    const float mask_value = score.mask_value;
    const bool some_masks =
        !(Element<T>::widen(least.x) > mask_value && Element<T>::widen(least.y) > mask_value);
    if (!__any_sync(0xffffffffu, some_masks)) return;
    for_each_word(x, [&](std::uint32_t word, float& low, float& high) {
      const float2 bias = Element<T>::widen_pair(word);
      if (!(bias.x > mask_value)) low = negative_infinity;
      if (!(bias.y > mask_value)) high = negative_infinity;
    });
  }

  // -inf where masked.
  template <int N8>
  __device__ void mask(float (&x)[M16][N8][4]) const {
#pragma unroll
    for (int r = 0; r < 2 * M16; ++r) {
#pragma unroll
      for (int j = 0; j < words; ++j) {
        const std::uint32_t bits =
            load_shared_1(mask_ + static_cast<std::uint32_t>(r * 64 + 4 * j));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if ((bits & 1u << i) == 0) x[r / 2][4 * j + i / 2][r % 2 * 2 + i % 2] = negative_infinity;
        }
      }
    }
  }

 private:
  using Bias = BiasTile<16 * M16, N>;
  static constexpr int words = N / 32;

  // Calls body(biases of two neighbouring keys, their scores).
  template <int N8, class Body>
  __device__ void for_each_word(float (&x)[M16][N8][4], const Body& body) const {
#pragma unroll
    for (int r = 0; r < 2 * M16; ++r) {
#pragma unroll
      for (int j = 0; j < words; ++j) {
        const uint4 four = load_shared_16((bias_ ^ static_cast<std::uint32_t>(64 * j)) +
                                          static_cast<std::uint32_t>(r * 8 * Bias::row_bytes));
        const std::uint32_t word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float (&s)[4] = x[r / 2][4 * j + i];
          body(word[i], s[r % 2 * 2], s[r % 2 * 2 + 1]);
        }
      }
    }
  }

  std::uint32_t bias_;
  std::uint32_t mask_;
};

}  // namespace flash_dmattn::cuda::sm80
