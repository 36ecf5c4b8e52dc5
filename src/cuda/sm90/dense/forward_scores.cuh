#pragma once

#include "cuda/attention/score.cuh"
#include "cuda/sm90/forward/storage.cuh"

namespace flash_dmattn::cuda::sm90 {

// The way in which the mask of a key tile is read; `none` if it hides no key of the tile.
enum class MaskForm : std::uint8_t { none, bits, bytes };

// A dense mask and a dense bias of a key tile for the scores of a warpgroup (layout: wgmma.cuh). Biases are masked in
// 16 bits, two neighbouring keys in a word. They are added to the scores when they are read, or read before and kept. A
// thread's two rows of scores have `Queries` queries, which are 8 apart in the tile. With one query, the rows belong to
// two heads that share mask and bias.
template <class T, class Tile>
class DenseScores {
  using Biases = typename Tile::Biases;
  static constexpr int keys = Biases::columns;

 public:
  // Reads the biases: 0 without a bias, and -inf where the bias or the mask masks. `row` is the first of the thread's
  // queries in the tile.
  template <int Queries, bool HasBias, MaskForm Mask>
  __device__ void load(const Tile& tile, int row, std::uint32_t mask_values) {
    for_each_two<Queries, HasBias, Mask>(
        tile, row, mask_values, [&](int h, int i, std::uint32_t two) { biases_[h][i] = two; });
  }

  // Adds factor bias to the scores, for the loaded biases.
  template <int Queries>
  __device__ void add(float factor, float (&scores)[keys / 2]) const {
#pragma unroll
    for (int h = 0; h < Queries; ++h) {
#pragma unroll
      for (int i = 0; i < keys / 8; ++i) add_two<Queries>(h, i, biases_[h][i], factor, scores);
    }
  }

  // Does load() and add() without registers between them.
  template <int Queries, bool HasBias, MaskForm Mask>
  static __device__ void load_and_add(const Tile& tile, int row, std::uint32_t mask_values,
                                      float factor, float (&scores)[keys / 2]) {
    for_each_two<Queries, HasBias, Mask>(
        tile, row, mask_values,
        [&](int h, int i, std::uint32_t two) { add_two<Queries>(h, i, two, factor, scores); });
  }

 private:
  // Adds the biases of two neighbouring keys to the rows of a query.
  template <int Queries>
  static __device__ void add_two(int h, int i, std::uint32_t biases, float factor,
                                 float (&scores)[keys / 2]) {
    const float2 two = Element<T>::widen_packed2(biases);
#pragma unroll
    for (int row = h; row < 2; row += Queries) {
      float* const s = scores + 4 * i + 2 * row;
      s[0] = fmaf(two.x, factor, s[0]);
      s[1] = fmaf(two.y, factor, s[1]);
    }
  }

  // Calls body(h, i, biases) for the thread's queries, which are 8 h rows after `row`, and its two keys of [8 i, 8 i +
  // 8).
  template <int Queries, bool HasBias, MaskForm Mask, class Body>
  static __device__ void for_each_two(const Tile& tile, int row, std::uint32_t mask_values,
                                      const Body& body) {
    using Packed2 = typename Element<T>::Packed2;
    constexpr std::uint32_t infinities = (Element<T>::exponent_mask | 0x8000u) * 0x00010001u;
    const std::uint32_t from = shared_address(tile.bias) + Biases::offset(row, 0) + column() * 2;
    for_each_eight<Queries, Mask == MaskForm::bits>(tile, row, [&](int h, int i, const Bits& bits) {
      std::uint32_t biases = 0;
      std::uint32_t visible = ~0u;
      if (HasBias) {
        constexpr int panel_chunks = panel_row_bytes / 16;
        biases = load_shared_4((from ^ (i % panel_chunks * 16)) +
                               i / panel_chunks * Biases::panel_bytes + h * 8 * panel_row_bytes);
        visible = __hgt2_mask(reinterpret_cast<const Packed2&>(biases),
                              reinterpret_cast<const Packed2&>(mask_values));
      }
      // Spreads byte i of each word to the two bytes of an element.
      if constexpr (Mask == MaskForm::bits)
        visible &= spread_signs(bits.even, bits.odd, 0xcc88u + 0x1111u * (i % 4));
      if constexpr (Mask == MaskForm::bytes) visible &= load_two_bytes(tile, row + 8 * h, i);
      body(h, i, (biases & visible) | (infinities & ~visible));
    });
  }

  // Sets all bits of an element for each of the thread's two keys of [8 i, 8 i + 8) that the mask shows. A byte is
  // compared with 0 as a 16-bit number, which is subnormal.
  static __device__ std::uint32_t load_two_bytes(const Tile& tile, int row, int i) {
    const std::uint32_t from =
        shared_address(tile.mask.bytes) + Tile::Mask::Bytes::offset(row, 0) + column();
    const std::uint32_t two = load_shared_2((from ^ (i / 2 * 16)) + i % 2 * 8);
    const std::uint32_t elements = __byte_perm(two, 0, 0x4140);
    return __hne2_mask(reinterpret_cast<const __half2&>(elements), __half2{});
  }

  // The mask of 32 keys of a query. The highest bit of byte i is this thread's even or odd key of the i-th eight.
  struct Bits {
    std::uint32_t even;
    std::uint32_t odd;
  };

  static __device__ int column() { return static_cast<int>(threadIdx.x) % 4 * 2; }

  // Calls body(h, i, bits) for the thread's queries, which are 8 h rows after `row`, and its two keys of [8 i, 8 i +
  // 8).
  template <int Queries, bool HasBits, class Body>
  static __device__ void for_each_eight(const Tile& tile, int row, const Body& body) {
    const std::uint32_t from = shared_address(tile.mask.bits) + row * 8;
#pragma unroll
    for (int h = 0; h < Queries; ++h) {
#pragma unroll
      for (int word = 0; word < Tile::words; ++word) {
        uint2 row_bits = {0, 0};
        if (HasBits) row_bits = load_shared_8(from + (word * PackedMask::side + 8 * h) * 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::uint32_t half_bits = half == 0 ? row_bits.x : row_bits.y;
          const Bits bits{half_bits << (7 - column()), half_bits << (6 - column())};
#pragma unroll
          for (int i = 0; i < 4; ++i) body(h, word * 8 + half * 4 + i, bits);
        }
      }
    }
  }

  std::uint32_t biases_[2][keys / 8];
};

}  // namespace flash_dmattn::cuda::sm90
