#pragma once

#include <type_traits>

#include "cuda/attention/scheduler.cuh"
#include "cuda/primitives/tile_copy.cuh"
#include "cuda/sm80/backward/key_bias_gradient.cuh"
#include "cuda/sm80/backward/p_transfer.cuh"
#include "cuda/sm80/backward/query_pipeline.cuh"
#include "cuda/sm80/dense/backward_scores.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/policy.h"
#include "cuda/sm80/tile/fragment.cuh"
#include "cuda/sm80/tile/transposed_scores.cuh"

namespace flash_dmattn::cuda::sm80 {

// The accumulators that a warp of the key-major backward has.
enum class WarpRole : std::uint8_t { dv, dk };

// The tiles of the key-major backward.
template <int D, bool HasDense>
struct KeyMajorTiles {
  static constexpr int warps = 8;
  static constexpr int role_warps = warps / 2;
  static constexpr int keys = owned_keys;
  static constexpr int warp_keys = keys / role_warps;
  static constexpr int rows = DqAccumLayout<D>::rows;

  using KeyRows = SharedTile<keys, D>;
  using Scores = SharedTile<keys, rows>;
  using KeyOrder = std::conditional_t<HasDense, LaneContiguous<4>, InOrder>;
  using Iterator = std::conditional_t<HasDense, MaskedQueryTiles, EveryQueryTile<rows>>;
  using Pipeline = QueryPipeline<rows, D, Iterator, role_warps * warp_size>;  // the dv warps copy
  using QueryRows = typename Pipeline::RowTile;

  // S of a tile is computed in two parts, queries [0, 32) and [32, 64). No branch lies between the product of the second
  // part and the exponentials of the first, so that they overlap. This gains 6 %. At D 128 dense masks and biases leave
  // too few registers for two parts.
  static constexpr int parts = HasDense && D > 64 ? 1 : 2;
  static constexpr int blocks_ahead = HasDense ? 1 : 3;  // blocks of B that are loaded ahead
};

struct Empty {
  template <class... Arguments>
  __device__ explicit Empty(const Arguments&...) {}
};

// A warp of the key-major backward: its role, and the steps from a query tile to P or dS.
template <class T, int D, bool HasDense, class SharedStorage>
struct KeyMajorWarp {
  using Tiles = KeyMajorTiles<D, HasDense>;
  using KeyRows = typename Tiles::KeyRows;
  using QueryRows = typename Tiles::QueryRows;
  using Scores = typename Tiles::Scores;
  using Pipeline = typename Tiles::Pipeline;
  static constexpr int rows = Tiles::rows;
  static constexpr int warp_keys = Tiles::warp_keys;
  static constexpr int parts = Tiles::parts;

  // A lane's part of the score tile of a warp, [warp_keys, rows], in fp32 and in 16 bits, as an A operand of a product
  // over the queries.
  static constexpr int m16 = warp_keys / 16;
  static constexpr int n8 = rows / 8;
  using ScoreAccumulator = Accumulator<warp_keys, rows>;
  using ScoreOperand = std::uint32_t[m16][n8 / 2][4];
  using Transfer = PTransfer<T, m16, n8>;

  __device__ KeyMajorWarp(const KeyMajorParams& params, SharedStorage& storage, const KeyTile& keys)
      : p(params),
        shared(storage),
        tile(keys),
        lane(lane_id()),
        number(warp_id()),
        role_warp(number % Tiles::role_warps),
        role(number < Tiles::role_warps ? WarpRole::dv : WarpRole::dk),
        flags(*p.flags),
        dense_scores(p.score, p.shape, tile, tile.key + role_warp * warp_keys) {}

  // Computes the columns of part `Part` of K q^T or V dout^T; does nothing if there is no such part.
  template <int Part>
  __device__ void multiply_part(std::uint32_t queries, ScoreAccumulator& x) const {
    constexpr int columns = n8 / parts;
    if constexpr (Part < parts) {
      clear_columns<Part * columns, (Part + 1) * columns>(x);
      multiply_columns<T, D, Part * columns, (Part + 1) * columns, Tiles::blocks_ahead>(
          x,
          OperandA<KeyRows, Major::k>(shared_address(role == WarpRole::dv ? shared.k : shared.v),
                                      role_warp * warp_keys),
          OperandB<QueryRows, Major::k>(queries, Part * rows / parts));
    }
  }

  // Computes P from S. Each path first computes the last part of S itself, since no branch may follow that product (see
  // `parts`).
  __device__ void compute_p(const Pipeline& queries, int n, QueryTilePosition at,
                            const QueryBounds& bounds, ScoreAccumulator& s,
                            ScoreOperand& p_operand) {
    const bool key_bias = p.score.bias.data != nullptr && !(HasDense && p.score.bias.dense);
    const bool partial = at.row < bounds.full_begin || at.row + rows > bounds.full_end;
    const bool large_lse = (flags & lse_is_large) != 0;
    const std::uint32_t q = queries.q_tile(n);
    const float* const lse = queries.lse(n);
    const float factor = p.score.final_log2_scale;
    if (HasDense || partial || large_lse || p.score.form == ScoreForm::nonpositive_scale) {
      multiply_part<1>(q, s);
      if (p.score.form == ScoreForm::nonpositive_scale)
        for_each_element(s, [&](float& x, int, int, int) { x *= p.score.inner; });
      if (key_bias && !large_lse) add_key_bias(s);
      if constexpr (HasDense) dense_scores.apply(at, transfer_tile(n), s);
      if (partial) mask_rows(shared.key_info, role_warp * warp_keys, lane, at.row, s);
      if (large_lse) {
        compute_p_of_large_lse(
            p, {tile.batch, at.head, tile.kv_head}, at.row, lse + 2 * (lane % 4),
            key_bias ? shared.key_info.bias + role_warp * warp_keys + lane / 4 : nullptr, s);
      }
      transfer(n).store_p(factor, lse, large_lse, s, p_operand);
    } else if (key_bias) {
      multiply_part<1>(q, s);
      add_key_bias(s);
      transfer(n).store_p(factor, lse, false, s, p_operand);
    } else {
      multiply_part<1>(q, s);
      transfer(n).store_p(factor, lse, false, s, p_operand);
    }
  }

  __device__ void add_key_bias(ScoreAccumulator& s) const {
    add_row_bias(p.score.factor, shared.key_info, role_warp * warp_keys, lane, s);
  }

  // Computes dS from dP, as an operand of this warp's product, and in shared memory for dq and a dense dbias.
  __device__ void compute_ds(const Pipeline& queries, int n, const ScoreAccumulator& dp,
                             ScoreOperand& ds) {
    transfer(n).load_p_and_make_ds(queries.delta(n), p.saturate, dp, ds);
    if (p.dbias.data != nullptr && !(HasDense && p.dbias.dense)) key_bias_gradient.add(ds);
    __syncwarp();  // all lanes have read P
#pragma unroll
    for (int m = 0; m < m16; ++m) {
#pragma unroll
      for (int k = 0; k < n8 / 2; ++k) {
        store_block<Scores>(
            scores_tile(n), [&](int r) { return role_warp * warp_keys + 16 * m + r; }, 16 * k,
            ds[m][k]);
      }
    }
  }

  // The shared tile that has P, and later dS, of tile n.
  __device__ std::uint32_t scores_tile(int n) const {
    return shared_address(shared.scores[static_cast<unsigned>(n) % 2]);
  }
  // The part of the score tile through which a dv warp transfers P. A dense bias is copied there first.
  __device__ std::uint32_t transfer_tile(int n) const {
    static_assert(warp_keys * Scores::row_bytes == DenseScores<T>::Bias::bytes);
    return scores_tile(n) + static_cast<std::uint32_t>(role_warp * warp_keys * Scores::row_bytes);
  }
  __device__ Transfer transfer(int n) const { return Transfer(transfer_tile(n), lane); }

  // The key of accumulator rows (m, h) of the lane.
  __device__ int key_of(int m, int h) const {
    return tile.key + Tiles::KeyOrder::key(role_warp * warp_keys + 16 * m + 8 * h + lane / 4);
  }

  const KeyMajorParams& p;
  SharedStorage& shared;
  const KeyTile tile;
  const int lane;
  const int number;
  const int role_warp;  // number among the warps of the role
  const WarpRole role;
  const std::uint32_t flags;
  KeyBiasGradient<T, m16> key_bias_gradient;
  std::conditional_t<HasDense, DenseScores<T>, Empty> dense_scores;
};

}  // namespace flash_dmattn::cuda::sm80
