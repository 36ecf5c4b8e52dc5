#pragma once

#include <type_traits>

#include "cuda/common/careful.cuh"
#include "cuda/common/scheduler.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/policy.h"
#include "cuda/sm80/epilogue.cuh"
#include "cuda/sm80/pair_tile.cuh"
#include "cuda/sm80/score_tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// A block computes a tile of queries of one head; each warp owns warp_rows of them, all columns of
// the score tile and of the output, so that the softmax stays inside a warp. `Pairs`: the mask or
// the bias has a query dimension.
template <class T, int D, ForwardPolicy P, bool Pairs>
struct ForwardKernel {
  using Params = ForwardParams;
  static constexpr int threads = P.warps * 32;
  static constexpr int min_blocks = P.min_blocks;
  static constexpr int rows = P.rows();
  static constexpr int m16 = P.warp_rows / 16;

  using QueryRows = SharedTile<rows, D>;
  using Order = std::conditional_t<Pairs, EightByLane, InOrder>;
  using Walk = std::conditional_t<Pairs, MaskedTiles, EveryTile>;
  using Stream = KeyStream<T, D, P.keys, 2, threads, Order, Walk>;
  using KeyRows = typename Stream::RowTile;

  struct SharedStorage {
    alignas(1024) std::byte q[QueryRows::bytes];
    typename Stream::Storage stream;
  };

  static long blocks(const Params& p) { return QueryTile::count(p.shape, rows); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const QueryTile tile(p.shape, rows, p.score.causal && p.plan.keys == nullptr,
                         static_cast<int>(blockIdx.x));
    const int row_end = min(tile.row + rows, p.shape.seqlen_q);
    const int warp_row = static_cast<int>(threadIdx.x / 32) * P.warp_rows;
    const std::uint32_t q_tile = shared_address(shared.q);

    const auto query = [&](int r) { return tile.row + r; };
    copy_rows<QueryRows, threads>(
        RowSource<QueryRows>(p.q, tile.batch, tile.head, p.shape.head_dim), q_tile,
        row_end - tile.row, query);
    [[maybe_unused]] const bool by_word = p.plan.keys == nullptr && row_end == tile.row + rows &&
                                          (!p.score.bias.per_query || p.score.bias.in_words);
    const KeyList list(p.plan, p.shape, p.score.causal, tile.batch, tile.kv_head, tile.row,
                       row_end);
    Stream stream(shared.stream, list, walk(p, tile, list.count),
                  RowSource<KeyRows>(p.k, tile.batch, tile.kv_head, p.shape.head_dim),
                  RowSource<KeyRows>(p.v, tile.batch, tile.kv_head, p.shape.head_dim),
                  ColumnLoader<T>(p.score, p.shape, tile.batch, tile.head, tile.kv_head), tile.row,
                  row_end, Pairs && !by_word);
    stream.start();

    Accumulator<P.warp_rows, D> out;
    clear(out);
    OnlineSoftmax<T, m16> softmax;
    const bool biased = p.score.bias.data != nullptr;
    const float factor = p.score.exponent;
    const OperandA<QueryRows, Major::k> q(q_tile, warp_row);
    const LanePosition position = LanePosition::of(tile.row + warp_row, 0);

    PairTile<T, m16, P.keys> pairs(p.score, tile, p.shape.seqlen_q, position.row);

    for (int n = 0; stream.has(n); ++n) {
      stream.advance(n);
      const auto& columns = stream.columns(n);
      const std::uint32_t state = stream.state(n);
      if ((state & columns.touched) != 0) {
        [[maybe_unused]] const bool words = by_word && stream.size(n) == P.keys;
        if constexpr (Pairs) {
          // On their way during the first product.
          if (words) {
            pairs.load(p.score, stream.first(n),
                       p.score.mask.per_query && !stream.walk().current_is_full());
          }
        }
        Accumulator<P.warp_rows, P.keys> scores;
        clear(scores);
        multiply<T, D>(scores, q, OperandB<KeyRows, Major::k>(stream.k_tile(n), 0));
        shape_scores(p.score, scores);
        if (biased && !(Pairs && p.score.bias.per_query)) {
          add_column_bias(p.score.factor, columns, position, scores);
        }
        if constexpr (Pairs) {
          if (words) {
            pairs.apply(p.score, scores);
          } else {
            PairScores<T>(p.score, tile, p.shape.seqlen_q, false, stream.size(n), stream.keys(n))
                .apply(columns, (state & columns.partial) != 0, position, scores);
          }
        }
        if ((state & columns.partial) != 0) mask_columns(columns, position, scores);
        softmax.update(scores, factor, out);

        std::uint32_t weights[m16][P.keys / 16][4];
#pragma unroll
        for (int m = 0; m < m16; ++m) {
#pragma unroll
          for (int k = 0; k < P.keys / 16; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              weights[m][k][i] = pack<T>(scores[m][2 * k + i / 2][2 * (i % 2)],
                                         scores[m][2 * k + i / 2][2 * (i % 2) + 1]);
            }
          }
        }
        multiply<T, P.keys>(out, weights, OperandB<KeyRows, Major::mn>(stream.v_tile(n), 0));
      }
      stream.finish(n);
    }
    cp_async_wait_all();
    softmax.add_lanes();
    store(p, tile, row_end, warp_row, q_tile, factor, softmax, out);
  }

 private:
  static __device__ Walk walk(const Params& p, const QueryTile& tile, int end) {
    if constexpr (Pairs) {
      return MaskedTiles(p.score.packed_mask, tile, p.shape.seqlen_q, rows, end, P.keys);
    } else {
      return {};
    }
  }

  static __device__ void store(const Params& p, const QueryTile& tile, int row_end, int warp_row,
                               std::uint32_t q_tile, float factor,
                               const OnlineSoftmax<T, m16>& softmax,
                               const Accumulator<P.warp_rows, D>& out) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float inverse[m16][2];
#pragma unroll
    for (int m = 0; m < m16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) inverse[m][h] = softmax.sum[m][h] > 0 ? 1 / softmax.sum[m][h] : 0;
    }
    // A warp's rows of q are its own: they can be overwritten without a barrier.
    __syncwarp();
    stage_accumulators<QueryRows>(out, q_tile, warp_row, 0, [&](float x, float y, int m, int h) {
      return pack_output<T>(x * inverse[m][h], y * inverse[m][h], p.saturate);
    });
    __syncwarp();
    write_rows<QueryRows>(q_tile, warp_row, min(warp_row + P.warp_rows, row_end - tile.row),
                          tile.row, p.out, tile.batch, tile.head, p.shape.head_dim, lane, 32);

    const std::int64_t lse_row =
        (static_cast<std::int64_t>(tile.batch) * p.shape.heads_q + tile.head) * p.shape.seqlen_q;
#pragma unroll
    for (int m = 0; m < m16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = 0;
#pragma unroll
        for (int d = 0; d < D / 8; ++d) {
          largest =
              max_or_nan(largest, max_or_nan(fabsf(out[m][d][2 * h]), fabsf(out[m][d][2 * h + 1])));
        }
        largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        const float sum = softmax.sum[m][h];
        const bool ordinary = sum > 0 && isfinite(sum) && isfinite(largest) &&
                              fabsf(softmax.max[m][h] * factor) < 1e38f;
        const int row = tile.row + warp_row + 16 * m + 8 * h + lane / 4;
        if (ordinary && lane % 4 == 0 && row < row_end) {
          const double lse = softmax.log_sum_exp(m, h, factor);
          p.lse[lse_row + row] = static_cast<float>(lse);
          if (p.lse_low != nullptr) {
            p.lse_low[lse_row + row] =
                static_cast<float>(lse - static_cast<double>(static_cast<float>(lse)));
          }
        }
        __syncwarp();  // write_rows is done in all lanes
        unsigned careful = __ballot_sync(0xffffffffu, !ordinary && row < row_end) & 0x11111111u;
        for (; careful != 0; careful &= careful - 1) {
          const int source = __ffs(static_cast<int>(careful)) - 1;
          careful_row<T>(p, tile.batch, tile.head, tile.kv_head,
                         tile.row + warp_row + 16 * m + 8 * h + source / 4);
        }
      }
    }
  }
};

}  // namespace flash_dmattn::cuda::sm80
