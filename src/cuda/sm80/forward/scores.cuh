#pragma once

#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/sm80/dense/elements.cuh"
#include "cuda/sm80/dense/forward_tile.cuh"
#include "cuda/sm80/tile/kv_pipeline.cuh"

// Score policies define how a forward kernel computes scores from the products q . k of a key tile. A policy defines
// the source of the keys, the iterator over visited tiles, the order of rows and keys in a fragment, and data that is
// loaded to shared memory with the keys (Extra of KvPipeline).
namespace flash_dmattn::cuda::sm80 {

// Rows and keys are in order, and only keys are loaded.
struct KeysAlone {
  using RowOrder = cuda::RowOrder<1>;
  using KeyOrder = InOrder;
  template <int Queries, int Keys, class Group>
  using Extra = NoExtra;

  template <class Extra, class Group>
  static __device__ Extra extra(Group, const ForwardParams&, const QueryTile&, int) {
    return {};
  }
};

// Adds the biases of the keys of tile n, less the rows' references, to scores whose hidden elements are -inf.
template <class Order = RowOrder<1>, class Pipeline, class T, int M16, int N8>
__device__ inline void add_key_biases(const ForwardParams& p, const Pipeline& kv, int n,
                                      std::uint32_t state, LanePosition position,
                                      OnlineSoftmax<T, M16>& softmax, float (&scores)[M16][N8][4]) {
  const auto& key_info = kv.key_info(n);
  const float* const biases = &key_info.bias[position.column];
  if ((state & Pipeline::KeyInfo::far) != 0 || softmax.has_references)
    softmax.raise_references(scores, biases);
  if (p.score.bias_delay == 0) {
    softmax.has_references ? add_column_bias(p.score.factor, biases, softmax.reference, scores)
                           : add_column_bias(p.score.factor, biases, scores);
  } else {
    add_delayed_column_bias(
        p.score.factor, key_info, [&](int m, int h) { return softmax.reference[m][h]; },
        position.column,
        [&](int column) {
          return delayed_bias_begin(p.score, p.shape, kv.key_of_column(n, column));
        },
        [&](int m, int h) { return position.row + Order::query(16 * m + 8 * h); }, scores);
  }
}

// Tiles that are empty in the packed mask are skipped.
struct NonEmptyByMask {
  using Tiles = VisibleTiles;

  template <int Queries, int Keys>
  static __device__ Tiles tiles(const ForwardParams& p, const QueryTile& tile,
                                const TileKeys& keys) {
    return {p.score.packed_mask, tile, p.shape.seqlen_q, Queries, keys, Keys};
  }
};

// Masks and biases belong to keys.
template <KvSource Source>
struct KeyScores : KeysAlone {
  static constexpr KvSource source = Source;
  static constexpr bool has_dense = false;
  using Tiles = EveryTile;

  template <int Queries, int Keys>
  static __device__ Tiles tiles(const ForwardParams&, const QueryTile&, const TileKeys&) {
    return {};
  }

  template <class T, class Pipeline, int M16, int N8>
  static __device__ void finish(const ForwardParams& p, const QueryTile& tile, int warp_row,
                                const Pipeline& kv, int n, std::uint32_t state,
                                OnlineSoftmax<T, M16>& softmax, float (&scores)[M16][N8][4]) {
    const LanePosition position = LanePosition::of(tile.row + warp_row, 0);
    shape_scores(p.score, scores);
    if ((state & Pipeline::KeyInfo::partial) != 0) mask_columns(kv.key_info(n), position, scores);
    if (p.score.bias.data != nullptr) add_key_biases(p, kv, n, state, position, softmax, scores);
  }
};

// A dense mask or bias, read element by element.
struct ElementScores : KeysAlone, NonEmptyByMask {
  static constexpr KvSource source = KvSource::either;
  static constexpr bool has_dense = true;

  template <class T, class Pipeline, int M16, int N8>
  static __device__ void finish(const ForwardParams& p, const QueryTile& tile, int warp_row,
                                const Pipeline& kv, int n, std::uint32_t state,
                                OnlineSoftmax<T, M16>& softmax, float (&scores)[M16][N8][4]) {
    const LanePosition position = LanePosition::of(tile.row + warp_row, 0);
    const bool partial = (state & Pipeline::KeyInfo::partial) != 0;
    shape_scores(p.score, scores);
    DenseElements<T, typename Pipeline::Positions>(p.score, tile, p.shape.seqlen_q, kv.size(n),
                                                   kv.positions(n))
        .apply(kv.key_info(n), partial, position, scores);
    if (partial) mask_columns(kv.key_info(n), position, scores);
    if (p.score.bias.data != nullptr && !p.score.bias.dense)
      add_key_biases(p, kv, n, state, position, softmax, scores);
  }
};

// A dense mask or bias without a tile list. Both are loaded to shared memory with the keys; the mask is packed, and the
// bias aligned_16B. Tiles that are empty in the mask are skipped. A block's rows belong to `Heads` heads, one head or
// two that have the same mask and bias.
template <int Heads>
struct TileScores : NonEmptyByMask {
  static constexpr KvSource source = KvSource::consecutive;
  static constexpr bool has_dense = true;
  using RowOrder = cuda::RowOrder<Heads>;
  using KeyOrder = LaneContiguous<8>;
  template <int Queries, int Keys, class Group>
  using Extra = DenseTileLoader<Queries, Keys, Group>;

  template <class Extra, class Group>
  static __device__ Extra extra(Group group, const ForwardParams& p, const QueryTile& tile,
                                int row_end) {
    return {group, p.score, p.shape.seqlen_q, tile, row_end};
  }

  template <class T, class Pipeline, int M16, int N8>
  static __device__ void finish(const ForwardParams& p, const QueryTile& tile, int warp_row,
                                const Pipeline& kv, int n, std::uint32_t state,
                                OnlineSoftmax<T, M16>& softmax, float (&scores)[M16][N8][4]) {
    if (p.score.form == ScoreForm::nonpositive_scale) {
      for_each_element(scores, [&](float& s, int, int, int) { s *= p.score.inner; });
    }
    const int warp_query = RowOrder::query(warp_row);
    const DenseTile<T, M16, N8 * 8, RowOrder> dense(kv.extra(n), kv.tiles().first(n), warp_query);
    const LanePosition position = LanePosition::of(tile.row + warp_query, 0);
    const bool unmasked = kv.tiles().is_unmasked(n);
    if (p.score.bias.dense) {
      const std::uint32_t mask_values = packed_mask_value<T>(p.score);
      unmasked ? dense.template add_bias<false>(p.score.dense_factor, mask_values, scores)
               : dense.template add_bias<true>(p.score.dense_factor, mask_values, scores);
    } else if (!unmasked) {
      dense.mask(scores);
    }
    if ((state & Pipeline::KeyInfo::partial) != 0)
      mask_columns<RowOrder>(kv.key_info(n), position, scores);
    if (p.score.bias.data != nullptr && !p.score.bias.dense)
      add_key_biases<RowOrder>(p, kv, n, state, position, softmax, scores);
  }
};

}  // namespace flash_dmattn::cuda::sm80
