#pragma once

#include "cuda/policy.h"
#include "cuda/sm80/forward_epilogue.cuh"
#include "cuda/sm80/pair_stream.cuh"

namespace flash_dmattn::cuda::sm80 {

// ForwardKernel for a mask or a bias with a query dimension, without a list of keys: the bias lies
// in_words, and both come to shared memory with the keys. `Heads`: a block's rows are of one head or of
// two that have the same mask, ranks and bias. `Mask`: MaskBits of the packed mask, if there is a mask, or
// MaskBytes of the mask as it is.
template <class T, int D, ForwardPolicy P, int Heads, class Mask>
struct ForwardPairsKernel {
  using Params = ForwardParams;
  static constexpr int threads = P.warps * 32;
  static constexpr int min_blocks = P.min_blocks;
  static constexpr int queries = P.rows() / Heads;
  static constexpr int m16 = P.warp_rows / 16;

  using QueryRows = SharedTile<P.rows(), D>;
  using Order = RowOrder<Heads>;
  using Stream = PairStream<T, D, queries, P.keys, threads, Mask>;
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
    Softmax softmax;
    Stream stream(shared.stream, p, tile, row_end);
    // Where weighing a tile ahead of its maximum can pay.
    bool ahead = p.score.bias.per_query && p.score.form == ScoreForm::product;
    for (;; ahead = false) {
      clear(out);
      softmax = Softmax();
      if (visit_tiles(p, tile, warp_row, q_tile, ahead, stream, softmax, out)) break;
      stream.restart();
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

  // Adds all tiles to `out` and `softmax`; false if they have to be visited again without `ahead`.
  //
  // Weights need not refer to the maximum: fp32 and bf16 have range to spare. Once every row of a warp
  // has seen a key, a tile is weighed by the maxima so far without looking at its own (`ahead`): 100
  // instructions less, and without a branch from the first product to the last, so that the
  // compiler mixes both with what lies between. What shows afterwards, sums that have outgrown the range
  // or a bias that is a mask, is rare: then the block begins again and looks at every maximum.
  static __device__ bool visit_tiles(const Params& p, const QueryTile& tile, int warp_row,
                                     std::uint32_t q_tile, bool ahead, Stream& stream,
                                     Softmax& softmax, Out& out) {
    const OperandA<QueryRows, Major::k> q(q_tile, warp_row);
    bool begun = false;  // every row of the warp has a maximum
    LeastBias<T> least;  // of tiles weighed ahead
    float largest = 0;
    const auto cannot_vouch = [&] {
      return least.masks(p.score.mask_value) || (begun && softmax.outgrown(largest));
    };
    bool failed = false;
    while (stream.next_window(failed)) {
      for (int n = 0; n < stream.count(); ++n) {
        if (!stream.advance(n, cannot_vouch)) return false;
        if (begun && stream.simple()) {
          stream.masked()
              ? add_tile_ahead<true>(p, warp_row, q, stream, least, largest, softmax, out)
              : add_tile_ahead<false>(p, warp_row, q, stream, least, largest, softmax, out);
          continue;
        }
        stream.copy_next(n);
        const std::uint32_t state = stream.state(n);
        if ((state & Columns::touched) != 0) {
          ahead &= add_tile(p, tile, warp_row, q, state, stream.columns(n), stream, softmax, out);
          begun = ahead && softmax.has_begun();
        }
        stream.finish(n);
      }
      failed = cannot_vouch();
    }
    return !failed;
  }

  // Adds the current tile. 32 keys at a time: while one part is weighed there are products of another
  // to do.
  template <bool Masked>
  static __device__ void add_tile_ahead(const Params& p, int warp_row,
                                        const OperandA<QueryRows, Major::k>& q, Stream& stream,
                                        LeastBias<T>& least, float& largest, Softmax& softmax,
                                        Out& out) {
    constexpr int parts = P.keys / 32;
    Accumulator<P.warp_rows, 32> scores[parts];
    stream.copy_next_of_run();
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      clear(scores[i]);
      multiply<T, D>(scores[i], q, OperandB<KeyRows, Major::k>(stream.k_tile(), 32 * i));
    }
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      const auto pairs = stream.template pairs<m16, 32, Order>(Order::query(warp_row), 32 * i);
      float offsets[m16][2];
      softmax.get_offsets(p.score.exponent, offsets);
      pairs.template exponents<Masked>(p.score, offsets, scores[i], least);
      softmax.update_ahead(scores[i], largest);
      __syncwarp();  // moves the compiler to spread weights among products: 2 % at D 64
      const std::uint32_t values =
          stream.v_tile() + static_cast<std::uint32_t>(32 * i * KeyRows::row_bytes);
      add_values<T>(scores[i], OperandB<KeyRows, Major::mn>(values, 0), out);
    }
  }

  // The same, looking at its maxima. False where a bias of the warp masks: others will, too.
  static __device__ bool add_tile(const Params& p, const QueryTile& tile, int warp_row,
                                  const OperandA<QueryRows, Major::k>& q, std::uint32_t state,
                                  const Columns& columns, const Stream& stream, Softmax& softmax,
                                  Out& out) {
    Accumulator<P.warp_rows, P.keys> scores;
    clear(scores);
    multiply<T, D>(scores, q, OperandB<KeyRows, Major::k>(stream.k_tile(), 0));
    if (p.score.form == ScoreForm::scaled) {
      for_each_element(scores, [&](float& s, int, int, int) { s *= p.score.inner; });
    }
    const auto pairs = stream.template pairs<m16, P.keys, Order>(Order::query(warp_row), 0);
    const LanePosition position = LanePosition::of(tile.row + Order::query(warp_row), 0);
    bool bias_masks = false;
    if (p.score.bias.per_query) {
      LeastBias<T> least;
      stream.masked() ? pairs.template add_bias<true>(p.score.pair_factor, scores, least)
                      : pairs.template add_bias<false>(p.score.pair_factor, scores, least);
      bias_masks = warp_any(least.masks(p.score.mask_value));
      if (bias_masks) pairs.mask_by_bias(p.score.mask_value, scores);
    } else {
      if (p.score.bias.data != nullptr) {
        add_column_bias(p.score.factor, columns, position, scores);
      }
      if (stream.masked()) pairs.mask(scores);
    }
    if ((state & Columns::partial) != 0) mask_columns<Order>(columns, position, scores);
    softmax.update(scores, p.score.exponent, out);
    add_values<T>(scores, OperandB<KeyRows, Major::mn>(stream.v_tile(), 0), out);
    return !bias_masks;
  }
};

}  // namespace flash_dmattn::cuda::sm80
