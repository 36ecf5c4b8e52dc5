#pragma once

#include "cuda/common/scheduler.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sm80/dense_tile.cuh"
#include "cuda/sm80/forward_epilogue.cuh"
#include "cuda/sm80/kv_pipeline.cuh"
#include "cuda/sm80/policy.h"

namespace flash_dmattn::cuda::sm80 {

// ForwardKernel for a dense mask or a dense bias without a tile list: both come to shared memory with
// the keys, the mask packed, the bias aligned_16B; tiles that the mask leaves empty are skipped. `Heads`:
// a block's rows are of one head or of two that have the same mask, ranks and bias.
template <class T, int D, ForwardPolicy P, int Heads>
struct DenseForwardKernel {
  using Params = ForwardParams;
  static constexpr int threads = P.warps * warp_size;
  static constexpr int min_blocks = P.min_blocks;
  static constexpr int queries = P.rows() / Heads;
  static constexpr int m16 = P.warp_rows / 16;

  using Group = ThreadGroup<threads>;
  using QueryRows = SharedTile<P.rows(), D>;
  using Order = RowOrder<Heads>;
  using Iterator = KeyTileIterator<P.keys, KvSource::consecutive, VisibleTiles>;
  using DenseLoader = DenseTileLoader<queries, P.keys, Group>;
  using Pipeline = KvPipeline<T, D, Iterator, 2, threads, LaneContiguous<8>, DenseLoader>;
  using KeyRows = typename Pipeline::RowTile;
  using Scores = Accumulator<P.warp_rows, P.keys>;

  struct SharedStorage {
    alignas(1024) std::byte q[QueryRows::bytes];
    typename Pipeline::Storage kv;
  };

  static long blocks(const Params& p) { return QueryTile::count(blocks_of_heads(p), queries); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    QueryTile tile(blocks_of_heads(p), queries, neighbours_share_keys(p),
                   static_cast<int>(blockIdx.x));
    tile.head *= Heads;
    const int row_end = min(tile.row + queries, p.shape.seqlen_q);
    const int warp_row = warp_id() * P.warp_rows;
    const std::uint32_t q_tile = shared_address(shared.q);
    const Group block = Group::of_block();

    const auto query = [&](int r) { return tile.row + Order::query(r); };
    copy_g2s(
        block, RowSource<QueryRows, Group>(block, p.q, tile.batch, tile.head, p.shape.head_dim),
        q_tile, [&](int r) { return query(r) < row_end; }, query, Order::head);
    const KeyInfoLoader<T> key_info_loader(p.score, p.shape, tile.batch, tile.head, tile.kv_head);
    const TileKeys keys(p, tile, row_end);
    const VisibleTiles tiles(p.score.packed_mask, tile, p.shape.seqlen_q, queries, keys, P.keys);
    Pipeline kv(shared.kv, Iterator(keys, tiles, key_info_loader.has_values()),
                typename Pipeline::Loader(block, shared.kv.loader, p, tile.batch, tile.kv_head),
                key_info_loader, DenseLoader(block, p.score, p.shape.seqlen_q, tile, row_end),
                tile.row, row_end);
    kv.start();

    Accumulator<P.warp_rows, D> out;
    clear(out);
    OnlineSoftmax<T, m16> softmax;
    const float factor = p.score.final_log2_scale;
    const OperandA<QueryRows, Major::k> q(q_tile, warp_row);

    for (int n = kv.begin(); kv.has(n); ++n) {
      kv.acquire(n);
      const std::uint32_t state = kv.state(n);
      if ((state & Pipeline::KeyInfo::touched) != 0) {
        Scores scores;
        clear(scores);
        multiply<T, D>(scores, q, OperandB<KeyRows, Major::k>(kv.k_tile(n), 0));
        if (!p.saturate) softmax.mark_nonfinite(scores);
        finish_scores(p, tile, warp_row, kv, n, state, scores);
        softmax.update(scores, factor, out);
        add_values<T>(scores, OperandB<KeyRows, Major::mn>(kv.v_tile(n), 0), out);
      }
      kv.release(n);
    }
    cp_async_wait_all();
    softmax.add_lanes();
    store_output<QueryRows, P.warp_rows, D, true, Order>(p, tile, row_end, warp_row, q_tile, factor,
                                                         softmax, out);
  }

 private:
  static __host__ __device__ Shape blocks_of_heads(const Params& p) {
    Shape shape = p.shape;
    shape.heads_q /= Heads;
    return shape;
  }

  // Makes scores of products: scale, bias and masks.
  static __device__ void finish_scores(const Params& p, const QueryTile& tile, int warp_row,
                                       const Pipeline& kv, int n, std::uint32_t state,
                                       Scores& scores) {
    if (p.score.form == ScoreForm::nonpositive_scale) {
      for_each_element(scores, [&](float& s, int, int, int) { s *= p.score.inner; });
    }
    const int warp_query = Order::query(warp_row);
    const DenseTile<T, m16, P.keys, Order> dense(kv.extra(n), kv.tiles().first(n), warp_query);
    const LanePosition position = LanePosition::of(tile.row + warp_query, 0);
    const bool unmasked = kv.tiles().is_unmasked(n);
    if (p.score.bias.dense) {
      const std::uint32_t mask_values = packed_mask_value<T>(p.score);
      unmasked ? dense.template add_bias<false>(p.score.dense_factor, mask_values, scores)
               : dense.template add_bias<true>(p.score.dense_factor, mask_values, scores);
    } else {
      if (p.score.bias.data != nullptr) {
        add_column_bias(p.score.factor, kv.key_info(n), position, scores);
      }
      if (!unmasked) dense.mask(scores);
    }
    if ((state & Pipeline::KeyInfo::partial) != 0) {
      mask_columns<Order>(kv.key_info(n), position, scores);
    }
  }
};

}  // namespace flash_dmattn::cuda::sm80
