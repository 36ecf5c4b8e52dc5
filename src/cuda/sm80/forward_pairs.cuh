#pragma once

#include "cuda/policy.h"
#include "cuda/sm80/forward_epilogue.cuh"
#include "cuda/sm80/pair_stream.cuh"

namespace flash_dmattn::cuda::sm80 {

// ForwardKernel for a mask or a bias with a query dimension, without a list of keys: the bias lies
// in_words, and both come to shared memory with the keys, the mask packed. `Heads`: a block's rows are of
// one head or of two that have the same mask, ranks and bias.
template <class T, int D, ForwardPolicy P, int Heads>
struct ForwardPairsKernel {
  using Params = ForwardParams;
  static constexpr int threads = P.warps * 32;
  static constexpr int min_blocks = P.min_blocks;
  static constexpr int queries = P.rows() / Heads;
  static constexpr int m16 = P.warp_rows / 16;

  using QueryRows = SharedTile<P.rows(), D>;
  using Order = RowOrder<Heads>;
  using Stream = PairStream<T, D, queries, P.keys, threads>;
  using KeyRows = typename Stream::RowTile;
  using Out = Accumulator<P.warp_rows, D>;
  using Softmax = OnlineSoftmax<T, m16>;
  using Columns = ColumnTile<P.keys>;

  struct SharedStorage {
    alignas(1024) std::byte q[QueryRows::bytes];
    typename Stream::Storage stream;
  };

  // Whether the kernel can compute a problem that has pairs.
  static bool takes(const Params& p) {
    const int group = p.shape.heads_kv > 0 ? p.shape.heads_q / p.shape.heads_kv : 0;
    // Packed, a mask may differ between heads whose ranks do.
    const bool heads_share = group % Heads == 0 && p.score.mask.head_q == 0 &&
                             p.score.packed_mask.head_q == 0 && p.score.bias.head_q == 0;
    return p.plan.keys == nullptr && p.score.form != ScoreForm::capped &&
           (!p.score.bias.per_query || p.score.bias.in_words) && (Heads == 1 || heads_share);
  }
  static long blocks(const Params& p) { return QueryTile::count(blocks_of_heads(p), queries); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    QueryTile tile(blocks_of_heads(p), queries, walks_neighbours(p), static_cast<int>(blockIdx.x));
    tile.head *= Heads;
    const int row_end = min(tile.row + queries, p.shape.seqlen_q);
    const int warp_row = warp_id() * P.warp_rows;
    const std::uint32_t q_tile = shared_address(shared.q);
    const auto query = [&](int r) { return tile.row + Order::query(r); };
    copy_rows<QueryRows, threads>(
        RowSource<QueryRows>(p.q, tile.batch, tile.head, p.shape.head_dim), q_tile,
        [&](int r) { return query(r) < row_end; }, query, Order::head);

    Out out;
    clear(out);
    Softmax softmax;
    Stream stream(shared.stream, p, tile, row_end);
    const OperandA<QueryRows, Major::k> q(q_tile, warp_row);
    while (stream.next_window()) {
      for (int n = 0; n < stream.count(); ++n) {
        stream.advance(n);
        const std::uint32_t state = stream.state(n);
        if ((state & Columns::touched) != 0) {
          Accumulator<P.warp_rows, P.keys> scores;
          clear(scores);
          multiply<T, D>(scores, q, OperandB<KeyRows, Major::k>(stream.k_tile(), 0));
          finish_scores(p, tile, warp_row, state, stream.columns(n), stream, scores);
          softmax.update(scores, p.score.exponent, out);
          add_values<T>(scores, OperandB<KeyRows, Major::mn>(stream.v_tile(), 0), out);
        }
        stream.finish(n);
      }
    }
    cp_async_wait_all();
    __syncthreads();  // where no tile is visited, nobody has waited for the others' copies of q
    softmax.add_lanes();
    store_output<QueryRows, P.warp_rows, D, true, Order>(p, tile, row_end, warp_row, q_tile,
                                                         p.score.exponent, softmax, out);
  }

 private:
  static __host__ __device__ Shape blocks_of_heads(const Params& p) {
    Shape shape = p.shape;
    shape.heads_q /= Heads;
    return shape;
  }

  // Makes scores of products: scale, bias and masks.
  static __device__ void finish_scores(const Params& p, const QueryTile& tile, int warp_row,
                                       std::uint32_t state, const Columns& columns,
                                       const Stream& stream,
                                       Accumulator<P.warp_rows, P.keys>& scores) {
    if (p.score.form == ScoreForm::scaled) {
      for_each_element(scores, [&](float& s, int, int, int) { s *= p.score.inner; });
    }
    const auto pairs = stream.template pairs<m16, Order>(Order::query(warp_row));
    const LanePosition position = LanePosition::of(tile.row + Order::query(warp_row), 0);
    if (p.score.bias.per_query) {
      const std::uint32_t mask_values = packed_mask_value<T>(p.score);
      stream.masked() ? pairs.template add_bias<true>(p.score.pair_factor, mask_values, scores)
                      : pairs.template add_bias<false>(p.score.pair_factor, mask_values, scores);
    } else {
      if (p.score.bias.data != nullptr) {
        add_column_bias(p.score.factor, columns, position, scores);
      }
      if (stream.masked()) pairs.mask(scores);
    }
    if ((state & Columns::partial) != 0) mask_columns<Order>(columns, position, scores);
  }
};

}  // namespace flash_dmattn::cuda::sm80
