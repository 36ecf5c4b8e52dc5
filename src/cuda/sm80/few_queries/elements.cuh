#pragma once

#include "cuda/attention/key_tiles.cuh"
#include "cuda/sm80/few_queries/rows.cuh"
#include "cuda/sm80/tile/fragment.cuh"

// The score policy for rows that are queries of several heads.
namespace flash_dmattn::cuda::sm80::few_queries {

// The two rows that a lane has of a fragment of 16.
struct LaneRows {
  int query[2];

  __device__ LaneRows(const GroupRows& rows, int warp_row) {
    const int row = warp_row + lane_id() / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) query[h] = rows.query(row + 8 * h);
  }
};

struct NoElements {
  __device__ NoElements(const ForwardParams&, const GroupRows&, int) {}
  template <int N8, class KeyInfo, class Positions>
  __device__ void apply(const KeyInfo&, bool, const Positions&, const LaneRows&, int,
                        float (&)[1][N8][4]) const {}
};

// Masks and biases that differ between the rows of a block. They are read element by element, as they have few bytes
// compared to K and V.
template <class T>
class RowElements {
 public:
  __device__ RowElements(const ForwardParams& p, const GroupRows& rows, int warp_row)
      : score_(p.score), shape_(p.shape) {
    const ScoreParams& score = p.score;
    const int row = warp_row + lane_id() / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const QueryHead head = rows.head(row + 8 * h);
      const int query = rows.query(row + 8 * h);
      mask_[h] = head.element(score.mask, query, 0);
      bias_[h] = head.element(score.bias, query, 0);
    }
  }

  // x = scale x + bias (or x without a dense bias), -inf where masked. Elements that the key info hides are not read.
  // `partial` is the state of the key info, which may be missing if `partial` is false.
  template <int N8, class KeyInfo, class Positions>
  __device__ void apply(const KeyInfo& key_info, bool partial, const Positions& keys,
                        const LaneRows& rows, int column, float (&x)[1][N8][4]) const {
    for_each_element(x, [&](float& s, int, int n, int e) {
      const int c = column + 8 * n + e % 2;
      const int h = e / 2;
      // mask_columns masks the elements that the key info hides.
      const int query = rows.query[h];
      if (!partial || key_info.range[c].sees(query)) apply_element(h, query, keys[c], s);
    });
  }

 private:
  __device__ void apply_element(int h, int query, std::int64_t key, float& s) const {
    bool visible = true;
    if (score_.mask.dense) {
      visible = reinterpret_cast<const std::uint8_t*>(
                    score_.mask.data)[mask_[h] + key * score_.mask.key] != 0;
    }
    if (score_.bias.dense) {
      const bool biased = visible && has_bias(score_, shape_, query, static_cast<int>(key));
      const float bias =
          biased ? load_bias<T>(score_.bias, bias_[h] + key * score_.bias.key) : 0.0f;
      visible = visible && (!biased || bias > score_.mask_value);
      s = fmaf(s, score_.dense_factor, bias);
    }
    if (!visible) s = negative_infinity;
  }

  const ScoreParams& score_;
  const Shape& shape_;
  std::int64_t mask_[2];
  std::int64_t bias_[2];
};

}  // namespace flash_dmattn::cuda::sm80::few_queries
