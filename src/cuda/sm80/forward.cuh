#pragma once

#include <type_traits>

#include "cuda/common/scheduler.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/policy.h"
#include "cuda/sm80/forward_epilogue.cuh"
#include "cuda/sm80/score_tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// A block computes a tile of queries of one head; each warp owns warp_rows of them, all columns of
// the score tile and of the output, so that the softmax stays inside a warp. `Pairs`: the mask or
// the bias has a query dimension and is read by single elements; what lies in words has a kernel of
// its own, forward_pairs.cuh.
template <class T, int D, ForwardPolicy P, KeySource Source, bool Pairs>
struct ForwardKernel {
  using Params = ForwardParams;
  static constexpr int threads = P.warps * 32;
  static constexpr int min_blocks = P.min_blocks;
  static constexpr int rows = P.rows();
  static constexpr int m16 = P.warp_rows / 16;

  using QueryRows = SharedTile<rows, D>;
  using Walk = std::conditional_t<Pairs, MaskedTiles, EveryTile>;
  using Stream = KeyStream<T, D, P.keys, 2, threads, Source, Walk>;
  using KeyRows = typename Stream::RowTile;

  struct SharedStorage {
    alignas(1024) std::byte q[QueryRows::bytes];
    typename Stream::Storage stream;
  };

  static long blocks(const Params& p) { return QueryTile::count(p.shape, rows); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const QueryTile tile(p.shape, rows, walks_neighbours(p), static_cast<int>(blockIdx.x));
    const int row_end = min(tile.row + rows, p.shape.seqlen_q);
    const int warp_row = warp_id() * P.warp_rows;
    const std::uint32_t q_tile = shared_address(shared.q);

    const auto query = [&](int r) { return tile.row + r; };
    copy_rows<QueryRows, threads>(
        RowSource<QueryRows>(p.q, tile.batch, tile.head, p.shape.head_dim), q_tile,
        row_end - tile.row, query);
    const KeyList list(p, tile, row_end);
    Stream stream(shared.stream, list, walk(p, tile, list),
                  RowSource<KeyRows>(p.k, tile.batch, tile.kv_head, p.shape.head_dim),
                  RowSource<KeyRows>(p.v, tile.batch, tile.kv_head, p.shape.head_dim),
                  ColumnLoader<T>(p.score, p.shape, tile.batch, tile.head, tile.kv_head), tile.row,
                  row_end, Pairs);
    stream.start();

    Accumulator<P.warp_rows, D> out;
    clear(out);
    OnlineSoftmax<T, m16> softmax;
    const bool biased = p.score.bias.data != nullptr;
    const float factor = p.score.exponent;
    const OperandA<QueryRows, Major::k> q(q_tile, warp_row);
    const LanePosition position = LanePosition::of(tile.row + warp_row, 0);

    for (int n = stream.begin(); stream.has(n); ++n) {
      stream.advance(n);
      const auto& columns = stream.columns(n);
      const std::uint32_t state = stream.state(n);
      if ((state & columns.touched) != 0) {
        Accumulator<P.warp_rows, P.keys> scores;
        clear(scores);
        multiply<T, D>(scores, q, OperandB<KeyRows, Major::k>(stream.k_tile(n), 0));
        shape_scores(p.score, scores);
        if (biased && !(Pairs && p.score.bias.per_query)) {
          add_column_bias(p.score.factor, columns, position, scores);
        }
        if constexpr (Pairs) {
          PairScores<T>(p.score, tile, p.shape.seqlen_q, false, stream.size(n), stream.keys(n))
              .apply(columns, (state & columns.partial) != 0, position, scores);
        }
        if ((state & columns.partial) != 0) mask_columns(columns, position, scores);
        softmax.update(scores, factor, out);

        add_values<T>(scores, OperandB<KeyRows, Major::mn>(stream.v_tile(n), 0), out);
      }
      stream.finish(n);
    }
    cp_async_wait_all();
    softmax.add_lanes();
    store_output<QueryRows, P.warp_rows, D, Pairs>(p, tile, row_end, warp_row, q_tile, factor,
                                                   softmax, out);
  }

 private:
  static __device__ Walk walk(const Params& p, const QueryTile& tile, const KeyList& list) {
    if constexpr (Pairs) {
      return MaskedTiles(p.score.packed_mask, tile, p.shape.seqlen_q, rows, list, P.keys);
    } else {
      return {};
    }
  }
};

}  // namespace flash_dmattn::cuda::sm80
