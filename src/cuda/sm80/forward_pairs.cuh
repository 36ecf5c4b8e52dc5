#pragma once

#include "cuda/policy.h"
#include "cuda/sm80/forward_epilogue.cuh"
#include "cuda/sm80/pair_stream.cuh"

namespace flash_dmattn::cuda::sm80 {

// ForwardKernel for a mask or a bias with a query dimension, without a list of keys: the mask is
// packed, the bias lies in_words, and both come to shared memory with the keys.
template <class T, int D, ForwardPolicy P>
struct ForwardPairsKernel {
  using Params = ForwardParams;
  static constexpr int threads = P.warps * 32;
  static constexpr int min_blocks = P.min_blocks;
  static constexpr int rows = P.rows();
  static constexpr int m16 = P.warp_rows / 16;

  using QueryRows = SharedTile<rows, D>;
  using Stream = PairStream<T, D, rows, P.keys, threads>;
  using KeyRows = typename Stream::RowTile;

  struct SharedStorage {
    alignas(1024) std::byte q[QueryRows::bytes];
    typename Stream::Storage stream;
  };

  // Whether the kernel can compute a problem that has pairs.
  static bool takes(const Params& p) {
    return p.plan.keys == nullptr && p.score.form != ScoreForm::capped &&
           (!p.score.bias.per_query || p.score.bias.in_words);
  }
  static long blocks(const Params& p) { return QueryTile::count(p.shape, rows); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const QueryTile tile(p.shape, rows, walks_neighbours(p), static_cast<int>(blockIdx.x));
    const int row_end = min(tile.row + rows, p.shape.seqlen_q);
    const int warp_row = static_cast<int>(threadIdx.x / 32) * P.warp_rows;
    const std::uint32_t q_tile = shared_address(shared.q);
    copy_rows<QueryRows, threads>(
        RowSource<QueryRows>(p.q, tile.batch, tile.head, p.shape.head_dim), q_tile,
        row_end - tile.row, [&](int r) { return tile.row + r; });

    Accumulator<P.warp_rows, D> out;
    clear(out);
    OnlineSoftmax<T, m16> softmax;
    const float factor = p.score.exponent;
    const OperandA<QueryRows, Major::k> q(q_tile, warp_row);
    const LanePosition position = LanePosition::of(tile.row + warp_row, 0);

    Stream stream(shared.stream, p, tile, row_end);
    while (stream.next_window()) {
      for (int n = 0; n < stream.count(); ++n) {
        stream.advance(n);
        const auto& columns = stream.columns(n);
        const std::uint32_t state = stream.state(n);
        if ((state & columns.touched) != 0) {
          Accumulator<P.warp_rows, P.keys> scores;
          clear(scores);
          multiply<T, D>(scores, q, OperandB<KeyRows, Major::k>(stream.k_tile(n), 0));
          if (p.score.form == ScoreForm::scaled) {
            for_each_element(scores, [&](float& s, int, int, int) { s *= p.score.inner; });
          }
          const auto pairs = stream.template pairs<m16>(n, warp_row);
          if (p.score.bias.per_query) {
            pairs.add_bias(p.score, scores);
          } else if (p.score.bias.data != nullptr) {
            add_column_bias(p.score.factor, columns, position, scores);
          }
          if (stream.masked()) pairs.mask(scores);
          if ((state & columns.partial) != 0) mask_columns(columns, position, scores);
          softmax.update(scores, factor, out);
          add_values<T>(scores, OperandB<KeyRows, Major::mn>(stream.v_tile(n), 0), out);
        }
        stream.finish(n);
      }
    }
    cp_async_wait_all();
    __syncthreads();  // where no tile is visited, nobody has waited for the others' copies of q
    softmax.add_lanes();
    store_output<QueryRows, P.warp_rows, D, true>(p, tile, row_end, warp_row, q_tile, factor,
                                                  softmax, out);
  }
};

}  // namespace flash_dmattn::cuda::sm80
