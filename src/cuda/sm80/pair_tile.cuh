#pragma once

#include "cuda/common/scheduler.cuh"
#include "cuda/common/score.cuh"
#include "cuda/sm80/score_tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// The mask and the bias of a warp's score tile, M16 x 16 queries x N keys in EightByLane order: a
// byte of the packed mask and 16 bytes of the bias for each row and 32 keys of a lane.
template <class T, int M16, int N>
class PairTile {
 public:
  static constexpr int words = N / 32;

  // Of the rows from `row` on that the accumulators of a lane belong to. All rows and keys that are
  // loaded have to exist, and a bias has to be in_words.
  __device__ PairTile(const ScoreParams& score, const QueryTile& tile, int seqlen_q, int row) {
    const int quarter = static_cast<int>(threadIdx.x) % 4;
    const PackedMask& mask = score.packed_mask;
    const std::int64_t matrix =
        tile.batch * mask.batch + tile.head * mask.head_q + tile.kv_head * mask.head_kv;
    mask_from_ = reinterpret_cast<const std::byte*>(mask.bits) +
                 (matrix * seqlen_q + row) * mask.words * 8 + quarter;
    const Broadcast& bias = score.bias;
    bias_from_ = bias.data + 2 * (tile.batch * bias.batch + tile.head * bias.head_q +
                                  tile.kv_head * bias.head_kv + row * bias.query + 8 * quarter);
  }

  // Sends for keys [key, key + N).
  __device__ void load(const ScoreParams& score, int key, bool masked) {
    const std::int64_t mask_step = 8 * 8 * static_cast<std::int64_t>(score.packed_mask.words);
    const std::int64_t bias_step = 8 * 2 * score.bias.query;
#pragma unroll
    for (int r = 0; r < 2 * M16; ++r) {
      const std::byte* const mask = mask_from_ + key / 8 + r * mask_step;
#pragma unroll
      for (int j = 0; j < words; ++j) {
        mask_[r][j] = masked ? __ldg(reinterpret_cast<const std::uint8_t*>(mask + 4 * j)) : 0xff;
      }
      if (score.bias.per_query) {
        const std::byte* const from = bias_from_ + 2 * key + r * bias_step;
#pragma unroll
        for (int j = 0; j < words; ++j)
          bias_[r][j] = __ldg(reinterpret_cast<const uint4*>(from + 64 * j));
      }
    }
  }

  // x = scale x + bias (x without a bias of pairs), -inf where masked.
  template <int N8>
  __device__ void apply(const ScoreParams& score, float (&x)[M16][N8][4]) const {
    if (!score.bias.per_query) {
      for_each_element(x, [&](float& s, int m, int n, int e) {
        if (!unmasked(m, n, e)) s = negative_infinity;
      });
      return;
    }
    for_each_element(x, [&](float& s, int m, int n, int e) {
      s = fmaf(s, score.pair_factor, bias_of(m, n, e));
      if (!unmasked(m, n, e)) s = negative_infinity;
    });
    if (!__any_sync(0xffffffffu, some_bias_masks(score.mask_value))) return;
    for_each_element(x, [&](float& s, int m, int n, int e) {
      if (!(bias_of(m, n, e) > score.mask_value)) s = negative_infinity;
    });
  }

 private:
  __device__ bool unmasked(int m, int n, int e) const {
    return (mask_[2 * m + e / 2][n / 4] & 1u << (n % 4 * 2 + e % 2)) != 0;
  }

  __device__ float bias_of(int m, int n, int e) const {
    const uint4& four = bias_[2 * m + e / 2][n / 4];
    const std::uint32_t word = n % 4 == 0   ? four.x
                               : n % 4 == 1 ? four.y
                               : n % 4 == 2 ? four.z
                                            : four.w;
    const auto pair = reinterpret_cast<const typename Element<T>::Pair&>(word);
    return Element<T>::widen(e % 2 == 0 ? pair.x : pair.y);
  }

  __device__ bool some_bias_masks(float mask_value) const {
    using Pair = typename Element<T>::Pair;
    const auto pair = [](const std::uint32_t& bits) { return reinterpret_cast<const Pair&>(bits); };
    Pair least = pair(bias_[0][0].x);
#pragma unroll
    for (int r = 0; r < 2 * M16; ++r) {
#pragma unroll
      for (int j = 0; j < words; ++j) {
        const uint4& four = bias_[r][j];
        least = __hmin2_nan(least, __hmin2_nan(__hmin2_nan(pair(four.x), pair(four.y)),
                                               __hmin2_nan(pair(four.z), pair(four.w))));
      }
    }
    // A NaN is not greater either.
    return !(Element<T>::widen(least.x) > mask_value && Element<T>::widen(least.y) > mask_value);
  }

  const std::byte* mask_from_;
  const std::byte* bias_from_;
  std::uint32_t mask_[2 * M16][words];
  uint4 bias_[2 * M16][words];
};

}  // namespace flash_dmattn::cuda::sm80
