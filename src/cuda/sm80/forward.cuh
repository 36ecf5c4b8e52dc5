#pragma once

#include <type_traits>

#include "cuda/common/dense_elements.cuh"
#include "cuda/common/scheduler.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sm80/forward_epilogue.cuh"
#include "cuda/sm80/kv_pipeline.cuh"
#include "cuda/sm80/policy.h"

namespace flash_dmattn::cuda::sm80 {

// A block computes a tile of queries of one head; each warp owns warp_rows of them, all columns of
// the score tile and of the output, so that the softmax stays inside a warp. `HasDense`: the mask or
// the bias has a query dimension and is read element by element; aligned ones have a kernel of
// their own, forward_dense.cuh.
template <class T, int D, ForwardPolicy P, KvSource Source, bool HasDense>
struct ForwardKernel {
  using Params = ForwardParams;
  static constexpr int threads = P.warps * warp_size;
  static constexpr int min_blocks = P.min_blocks;
  static constexpr int rows = P.rows();
  static constexpr int m16 = P.warp_rows / 16;

  using Group = ThreadGroup<threads>;
  using QueryRows = SharedTile<rows, D>;
  using Tiles = std::conditional_t<HasDense, VisibleTiles, EveryTile>;
  using Iterator = KeyTileIterator<P.keys, Source, Tiles>;
  using Pipeline = KvPipeline<T, D, Iterator, 2, threads>;
  using KeyRows = typename Pipeline::RowTile;

  struct SharedStorage {
    alignas(1024) std::byte q[QueryRows::bytes];
    typename Pipeline::Storage kv;
  };

  static long blocks(const Params& p) { return QueryTile::count(p.shape, rows); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const QueryTile tile(p.shape, rows, neighbours_share_keys(p), static_cast<int>(blockIdx.x));
    const int row_end = min(tile.row + rows, p.shape.seqlen_q);
    const int warp_row = warp_id() * P.warp_rows;
    const std::uint32_t q_tile = shared_address(shared.q);
    const Group block = Group::of_block();

    const auto query = [&](int r) { return tile.row + r; };
    copy_g2s(block,
             RowSource<QueryRows, Group>(block, p.q, tile.batch, tile.head, p.shape.head_dim),
             q_tile, row_end - tile.row, query);
    const KeyInfoLoader<T> key_info_loader(p.score, p.shape, tile.batch, tile.head, tile.kv_head);
    const TileKeys keys(p, tile, row_end);
    Pipeline kv(shared.kv, Iterator(keys, tiles(p, tile, keys), key_info_loader.has_values()),
                typename Pipeline::Loader(block, shared.kv.loader, p, tile.batch, tile.kv_head),
                key_info_loader, NoExtra(), tile.row, row_end);
    kv.start();

    Accumulator<P.warp_rows, D> out;
    clear(out);
    OnlineSoftmax<T, m16> softmax;
    const bool biased = p.score.bias.data != nullptr;
    const float factor = p.score.final_log2_scale;
    const OperandA<QueryRows, Major::k> q(q_tile, warp_row);
    const LanePosition position = LanePosition::of(tile.row + warp_row, 0);

    for (int n = kv.begin(); kv.has(n); ++n) {
      kv.acquire(n);
      const auto& key_info = kv.key_info(n);
      const std::uint32_t state = kv.state(n);
      if ((state & key_info.touched) != 0) {
        Accumulator<P.warp_rows, P.keys> scores;
        clear(scores);
        multiply<T, D>(scores, q, OperandB<KeyRows, Major::k>(kv.k_tile(n), 0));
        if (!p.saturate) softmax.mark_nonfinite(scores);
        shape_scores(p.score, scores);
        if (biased && !(HasDense && p.score.bias.dense)) {
          add_column_bias(p.score.factor, key_info, position, scores);
        }
        if constexpr (HasDense) {
          DenseElements<T, typename Pipeline::Positions>(p.score, tile, p.shape.seqlen_q,
                                                         kv.size(n), kv.positions(n))
              .apply(key_info, (state & key_info.partial) != 0, position, scores);
        }
        if ((state & key_info.partial) != 0) mask_columns(key_info, position, scores);
        softmax.update(scores, factor, out);

        add_values<T>(scores, OperandB<KeyRows, Major::mn>(kv.v_tile(n), 0), out);
      }
      kv.release(n);
    }
    cp_async_wait_all();
    softmax.add_lanes();
    store_output<QueryRows, P.warp_rows, D, HasDense>(p, tile, row_end, warp_row, q_tile, factor,
                                                      softmax, out);
  }

 private:
  static __device__ Tiles tiles(const Params& p, const QueryTile& tile, const TileKeys& keys) {
    if constexpr (HasDense) {
      return VisibleTiles(p.score.packed_mask, tile, p.shape.seqlen_q, rows, keys, P.keys);
    } else {
      return {};
    }
  }
};

}  // namespace flash_dmattn::cuda::sm80
