#pragma once

#include "cuda/attention/scheduler.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/sm80/forward/epilogue.cuh"
#include "cuda/sm80/forward/scores.cuh"
#include "cuda/sm80/policy.h"
#include "cuda/sm80/tile/kv_pipeline.cuh"

namespace flash_dmattn::cuda::sm80 {

// A block computes a tile of queries of one head or of two heads. Each warp owns warp_rows of the rows, with all
// columns of the score tile and of the output, so that the softmax stays within a warp. `Scores` is a policy of
// scores.cuh.
template <class T, int D, ForwardPolicy P, class Scores>
struct ForwardKernel {
  using Params = ForwardParams;
  using RowOrder = typename Scores::RowOrder;
  static constexpr int threads = P.warps * warp_size;
  static constexpr int min_blocks = P.min_blocks;
  static constexpr int heads = RowOrder::heads;
  static constexpr int queries = P.rows() / heads;

  using Group = ThreadGroup<threads>;
  using QueryRows = SharedTile<P.rows(), D>;
  using Iterator = KeyTileIterator<P.keys, Scores::source, typename Scores::Tiles>;
  using Extra = typename Scores::template Extra<queries, P.keys, Group>;
  using Pipeline = KvPipeline<T, D, Iterator, 2, threads, typename Scores::KeyOrder, Extra>;
  using KeyRows = typename Pipeline::RowTile;

  struct SharedStorage {
    alignas(1024) std::byte q[QueryRows::bytes];
    typename Pipeline::Storage kv;
  };

  static long blocks(const Params& p) { return QueryTile::count(blocks_of_heads(p), queries); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    QueryTile tile(blocks_of_heads(p), queries, neighbours_share_keys(p),
                   static_cast<int>(blockIdx.x));
    tile.head *= heads;
    const int row_end = min(tile.row + queries, p.shape.seqlen_q);
    const int warp_row = warp_id() * P.warp_rows;
    const std::uint32_t q_tile = shared_address(shared.q);
    const Group block = Group::of_block();

    const auto query = [&](int r) { return tile.row + RowOrder::query(r); };
    copy_g2s(
        block, RowSource<QueryRows, Group>(block, p.q, tile.batch, tile.head, p.shape.head_dim),
        q_tile, [&](int r) { return query(r) < row_end; }, query, RowOrder::head);
    const KeyInfoLoader<T> key_info_loader(p.score, p.shape, tile.batch, tile.head, tile.kv_head);
    const TileKeys keys(p, tile, row_end);
    Pipeline kv(shared.kv,
                Iterator(keys, Scores::template tiles<queries, P.keys>(p, tile, keys),
                         key_info_loader.has_values()),
                typename Pipeline::Loader(block, shared.kv.loader, p, tile.batch, tile.kv_head),
                key_info_loader, Scores::template extra<Extra>(block, p, tile, row_end), tile.row,
                row_end);
    kv.start();

    Accumulator<P.warp_rows, D> out;
    clear(out);
    OnlineSoftmax<T, P.warp_rows / 16> softmax;
    const float factor = p.score.final_log2_scale;
    const OperandA<QueryRows, Major::k> q(q_tile, warp_row);

    for (int n = kv.begin(); kv.has(n); ++n) {
      kv.acquire(n);
      const std::uint32_t state = kv.state(n);
      if ((state & Pipeline::KeyInfo::touched) != 0) {
        Accumulator<P.warp_rows, P.keys> scores;
        clear(scores);
        multiply<T, D>(scores, q, OperandB<KeyRows, Major::k>(kv.k_tile(n), 0));
        if (!p.saturate) softmax.mark_nonfinite(scores);
        Scores::template finish<T>(p, tile, warp_row, kv, n, state, softmax, scores);
        softmax.update(scores, factor, out);
        add_values<T>(scores, OperandB<KeyRows, Major::mn>(kv.v_tile(n), 0), out);
      }
      kv.release(n);
    }
    cp_async_wait_all();
    softmax.add_lanes();
    store_output<QueryRows, P.warp_rows, D, Scores::has_dense, RowOrder>(
        p, tile, row_end, warp_row, q_tile, factor, softmax, out);
  }

 private:
  static __host__ __device__ Shape blocks_of_heads(const Params& p) {
    Shape shape = p.shape;
    shape.heads_q /= heads;
    return shape;
  }
};

}  // namespace flash_dmattn::cuda::sm80
