#pragma once

#include <type_traits>

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

// The least of a lane's biases, two at a time.
template <class T>
class LeastBias {
 public:
  __device__ void add(std::uint32_t biases) {
    pair_ = __hmin2_nan(pair_, reinterpret_cast<const Pair&>(biases));
  }
  // Whether one of them masks, as a NaN does.
  __device__ bool masks(float mask_value) const {
    return !(Element<T>::widen(pair_.x) > mask_value && Element<T>::widen(pair_.y) > mask_value);
  }

 private:
  using Pair = typename Element<T>::Pair;
  Pair pair_ = Element<T>::pack(0, 0);
};

// Two biases, -inf where not seen.
template <class T>
__device__ inline float2 hide(std::uint32_t biases, bool sees_x, bool sees_y) {
  float2 bias = Element<T>::widen_pair(biases);
  if (!sees_x) bias.x = negative_infinity;
  if (!sees_y) bias.y = negative_infinity;
  return bias;
}

// The mask of a tile in shared memory, 64 keys of each query, as lanes read it: eight neighbouring keys at
// a time, number `eight` of a query.
//
// Of the packed mask a bit for each key. A lane's bits become predicates.
struct MaskBits {
  static constexpr std::uint32_t row_bytes = 8;
  static __device__ std::uint32_t offset(int query, int eight) {
    return static_cast<std::uint32_t>(query) * row_bytes + static_cast<std::uint32_t>(eight);
  }
  // Four further, if `eight` was below.
  static __device__ std::uint32_t four_further(std::uint32_t address) { return address + 4; }

  struct Eight {
    std::uint32_t bits;

    __device__ explicit Eight(std::uint32_t address) : bits(load_shared_1(address)) {}

    __device__ bool sees(int key) const { return (bits >> key & 1) != 0; }
    // The biases of keys 2 i and 2 i + 1, -inf where masked, for `Heads` heads.
    template <class T, int Heads>
    __device__ float2 widen_pair(std::uint32_t biases, int i) const {
      return hide<T>(biases, sees(2 * i), sees(2 * i + 1));
    }
  };
};

// Of the mask as it is a byte. Rows are made of four chunks of 16 bytes, swizzled so that the 16 lanes of a
// step of an 8-byte load, which have two chunks of four neighbouring rows, find them in different banks.
struct MaskBytes {
  static constexpr std::uint32_t row_bytes = 64;
  static constexpr int chunks = 4;
  static __device__ std::uint32_t chunk_offset(int query, int chunk) {
    return static_cast<std::uint32_t>(query) * row_bytes +
           static_cast<std::uint32_t>((chunk ^ (query / 2 % 2 * 2)) << 4);
  }
  static __device__ std::uint32_t offset(int query, int eight) {
    return chunk_offset(query, eight / 2) + static_cast<std::uint32_t>(eight % 2 * 8);
  }
  static __device__ std::uint32_t four_further(std::uint32_t address) { return address ^ 32; }

  struct Eight {
    std::uint32_t low, high;  // the highest bit of a key's byte is set where it is seen

    __device__ explicit Eight(std::uint32_t address) {
      const uint2 bytes = load_shared_8(address);
      low = mark_nonzero_bytes(bytes.x);
      high = mark_nonzero_bytes(bytes.y);
    }

    __device__ bool sees(int key) const {
      return ((key < 4 ? low : high) & 0x80u << key % 4 * 8) != 0;
    }
    // With two heads bits become predicates, although masks are an instruction less: the compiler then
    // puts weights between products instead of next to each other, 5 % of the kernel at D 64.
    template <class T, int Heads>
    __device__ float2 widen_pair(std::uint32_t biases, int i) const {
      if constexpr (Heads == 2) {
        return hide<T>(biases, sees(2 * i), sees(2 * i + 1));
      } else {
        constexpr std::uint32_t infinities = (Element<T>::exponent_mask | 0x8000u) * 0x00010001u;
        // The highest bits of bytes 0 and 1 or 2 and 3, 16 times each.
        const std::uint32_t seen =
            permute_bytes(i < 2 ? low : high, i % 2 == 0 ? 0x9988u : 0xbbaau);
        return Element<T>::widen_pair((biases & seen) | (infinities & ~seen));
      }
    }
  };
};

// Where nothing is masked.
struct NoMask {
  struct Eight {
    __device__ explicit Eight(std::uint32_t) {}
    template <class T, int Heads>
    __device__ float2 widen_pair(std::uint32_t biases, int) const {
      return Element<T>::widen_pair(biases);
    }
  };
};

// What the mask and the bias do to a warp's scores, M16 x 16 rows x Keys of the N keys of a tile in
// EightByLane order: eight keys of the mask and 16 bytes of the bias for each query and 32 keys of a
// lane, which are read once for both heads of an Order of two.
template <class T, int M16, int N, int Keys, class Order, class Mask>
class PairTile {
 public:
  using Scores = float[M16][Keys / 8][4];

  // Shared addresses of the tiles, that of the mask at its first key of query 0; the first query and key.
  __device__ PairTile(std::uint32_t bias, std::uint32_t mask, int first_query, int first_key) {
    const int lane = lane_id();
    const int query = first_query + lane / 4;
    const int chunk = first_key / 8 + lane % 4;
    bias_ = bias + Bias::offset(query, chunk);
    mask_ = mask + Mask::offset(query, chunk);
  }

  // x = factor x + bias; -inf where the mask masks if the tile is `Masked`.
  template <bool Masked>
  __device__ void add_bias(float factor, Scores& x, LeastBias<T>& least) const {
    using Eight = typename std::conditional_t<Masked, Mask, NoMask>::Eight;
    for_each_word<Eight>([&](std::uint32_t word, const Eight& eight, int i, int r, int n) {
      least.add(word);
      const float2 bias = eight.template widen_pair<T, Order::heads>(word, i);
      for_each_head(x, r, n, [&](float& low, float& high, int, int) {
        low = fmaf(low, factor, bias.x);
        high = fmaf(high, factor, bias.y);
      });
    });
  }

  // Turns products into what weights are 2 to the power of: exponent (factor x + bias) - the row's offset;
  // -inf where the mask masks. What belongs to the bias does not wait for products.
  template <bool Masked>
  __device__ void exponents(const ScoreParams& score, const float (&offsets)[M16][2], Scores& x,
                            LeastBias<T>& least) const {
    using Eight = typename std::conditional_t<Masked, Mask, NoMask>::Eight;
    const float factor = score.pair_factor * score.exponent;
    for_each_word<Eight>([&](std::uint32_t word, const Eight& eight, int i, int r, int n) {
      least.add(word);
      const float2 bias = eight.template widen_pair<T, Order::heads>(word, i);
      for_each_head(x, r, n, [&](float& low, float& high, int m, int h) {
        low = fmaf(low, factor, fmaf(bias.x, score.exponent, -offsets[m][h]));
        high = fmaf(high, factor, fmaf(bias.y, score.exponent, -offsets[m][h]));
      });
    });
  }

  // -inf where the bias masks.
  __device__ void mask_by_bias(float mask_value, Scores& x) const {
    using Eight = NoMask::Eight;
    for_each_word<Eight>([&](std::uint32_t word, const Eight&, int, int r, int n) {
      const float2 bias = Element<T>::widen_pair(word);
      for_each_head(x, r, n, [&](float& low, float& high, int, int) {
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
        const typename Mask::Eight eight(mask_address(r, j));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          for_each_head(x, r, 4 * j + i, [&](float& low, float& high, int, int) {
            if (!eight.sees(2 * i)) low = negative_infinity;
            if (!eight.sees(2 * i + 1)) high = negative_infinity;
          });
        }
      }
    }
  }

 private:
  static constexpr int queries = 2 * M16 / Order::heads;  // of a lane, 8 apart
  static constexpr int words = Keys / 32;
  static_assert(words <= 2);
  using Bias = BiasTile<8 * queries, N>;

  // Of the lane's query r, keys 32 j and further.
  __device__ std::uint32_t mask_address(int r, int j) const {
    return (j == 0 ? mask_ : Mask::four_further(mask_)) +
           static_cast<std::uint32_t>(r * 8) * Mask::row_bytes;
  }

  // Calls body(biases of two neighbouring keys, the eight that they are among, place i of the two, query r,
  // n of their accumulators).
  template <class Eight, class Body>
  __device__ void for_each_word(const Body& body) const {
#pragma unroll
    for (int r = 0; r < queries; ++r) {
#pragma unroll
      for (int j = 0; j < words; ++j) {
        const uint4 four = load_shared_16((bias_ ^ static_cast<std::uint32_t>(64 * j)) +
                                          static_cast<std::uint32_t>(r * 8 * Bias::row_bytes));
        const std::uint32_t word[4] = {four.x, four.y, four.z, four.w};
        const Eight eight(mask_address(r, j));
#pragma unroll
        for (int i = 0; i < 4; ++i) body(word[i], eight, i, r, 4 * j + i);
      }
    }
  }

  // Calls body(the scores of both keys, m, h of rows 16 m + 8 h) for the heads of query r.
  template <class Body>
  static __device__ void for_each_head(Scores& x, int r, int n, const Body& body) {
#pragma unroll
    for (int head = 0; head < Order::heads; ++head) {
      const int half = r * Order::heads + head;  // 8 rows
      const int m = half / 2;
      const int h = half % 2;
      body(x[m][n][2 * h], x[m][n][2 * h + 1], m, h);
    }
  }

  std::uint32_t bias_;
  std::uint32_t mask_;
};

}  // namespace flash_dmattn::cuda::sm80
