#pragma once

#include "cuda/attention/score.cuh"
#include "cuda/sm90/forward/work_tile.cuh"

namespace flash_dmattn::cuda::sm90 {

// Applies a dense mask and a dense bias, of any dtype and strides, to the scores of a warpgroup (layout: wgmma.cuh),
// element by element. Keys and queries past the end read the last ones; the key info hides such keys, and such queries
// are not stored.
template <class T, int Keys>
class DenseElements {
 public:
  // `column` is the first column, in the tile that begins at key or list entry `first`.
  __device__ DenseElements(const ForwardKernelParams& params, const WorkTile& work, int first,
                           int column)
      : params_(params), work_(work), first_(first + column), list_(nullptr) {
    const QueryTileLists& lists = params.forward.tile_lists;
    if (lists.keys != nullptr) {
      // The entries of a tile are in the order of GatherProducer.
      first_ = first + column * steps;
      list_ = lists.keys + __ldg(lists.begin + list_of(lists, work));
    }
  }

  // Adds factor bias to the scores, and sets them to -inf where the mask or the bias masks. `query` is the query of the
  // first of the thread's two rows.
  __device__ void apply(int query, float (&scores)[Keys / 2]) const {
    const ScoreParams& score = params_.forward.score;
    const std::uint8_t* mask[2];
    std::int64_t bias[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int64_t row = min(query + 8 * h, params_.forward.shape.seqlen_q - 1);
      const auto begin = [&](const Broadcast& b) {
        return b.begin(work_.batch, work_.head, work_.kv_head) + row * b.query;
      };
      mask[h] = reinterpret_cast<const std::uint8_t*>(score.mask.data) + begin(score.mask);
      bias[h] = begin(score.bias);
    }
#pragma unroll
    for (int i = 0; i < Keys / 4; ++i) {
      const std::int64_t key = key_of(8 * (i / 2) + i % 2);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& s = scores[4 * (i / 2) + 2 * h + i % 2];
        bool visible = !score.mask.dense || __ldg(mask[h] + key * score.mask.key) != 0;
        if (score.bias.dense) {
          const float value = load_bias<T>(score.bias, bias[h] + key * score.bias.key);
          visible = visible && value > score.mask_value;
          s = fmaf(value, params_.bias_factor, s);
        }
        if (!visible) s = negative_infinity;
      }
    }
  }

 private:
  static constexpr int steps = Keys / 16;

  // The key of column `column`, relative to the thread's first.
  __device__ int key_of(int column) const {
    if (list_ == nullptr) return min(first_ + column, params_.forward.shape.seqlen_k - 1);
    // Column 16 r + c is entry c steps + r of the tile.
    const int place = first_ + column % 16 * steps + column / 16;
    return place < work_.end ? __ldg(list_ + place) : 0;
  }

  const ForwardKernelParams& params_;
  const WorkTile& work_;
  int first_;  // first key or list entry
  const std::int32_t* list_;
};

}  // namespace flash_dmattn::cuda::sm90
