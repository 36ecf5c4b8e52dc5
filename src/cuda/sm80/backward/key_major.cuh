#pragma once

#include <type_traits>

#include "cuda/attention/scheduler.cuh"
#include "cuda/primitives/semaphore.cuh"
#include "cuda/primitives/tile_copy.cuh"
#include "cuda/sm80/backward/dq_accumulate.cuh"
#include "cuda/sm80/backward/key_major_warp.cuh"
#include "cuda/sm80/backward/query_pipeline.cuh"
#include "cuda/sm80/dense/bias_gradient.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/tile/clear_non_finite.cuh"
#include "cuda/sm80/tile/transposed_scores.cuh"

namespace flash_dmattn::cuda::sm80 {

// The key-major backward. A block owns 128 keys of a kv head and visits the query tiles, of all heads of
// the group, that can see them. dk, dv and the gradient of a key bias stay in accumulators and are complete
// at the end; dq is added to fp32 sums in memory.
//
// Scores are transposed, [keys, queries], so that P and dS are A operands of the next product in the
// registers that hold them. Four warps of each role share the five products; warp w of a role has keys
// [32 w, 32 w + 32):
//   dv   S = K q^T,  P = exp2(S - lse)  --P-->  shared memory,  dv += P dout
//   dk   dP = V dout^T,  shared memory  --P-->  dS = P (dP - delta)  --dS-->  shared memory,  dk += dS q
// All warps compute dq += dS^T K one query tile later. While one role computes exponentials, the other multiplies. Two
// warps with the same keys synchronize on P at their own named barrier; the block synchronizes once for each query
// tile.
//
// With `HasDense`, the mask or the bias has a query dimension. With `Ordered`, dq is added in a fixed order.
template <class T, int D, bool HasDense, bool Ordered>
struct KeyMajorBackwardKernel {
  static_assert(
      !(HasDense && Ordered),
      "with dense masks and biases gradients are added in order by the query-major kernel");

  using Params = KeyMajorParams;
  using Tiles = KeyMajorTiles<D, HasDense>;
  static constexpr int threads = Tiles::warps * warp_size;
  static constexpr int min_blocks = 1;
  static constexpr int keys = Tiles::keys;
  static constexpr int warp_keys = Tiles::warp_keys;
  static constexpr int rows = Tiles::rows;

  using KeyRows = typename Tiles::KeyRows;
  using QueryRows = typename Tiles::QueryRows;
  using Scores = typename Tiles::Scores;
  using KeyOrder = typename Tiles::KeyOrder;
  using Iterator = typename Tiles::Iterator;
  using Pipeline = typename Tiles::Pipeline;
  using Block = ThreadGroup<threads>;
  using Semaphore = OrderSemaphore<Ordered, threads>;

  struct SharedStorage {
    alignas(1024) std::byte k[KeyRows::bytes];
    alignas(1024) std::byte v[KeyRows::bytes];
    typename Pipeline::Storage queries;
    // P on its way from a dv warp to a dk warp, and then dS, in the same bytes.
    alignas(1024) std::byte scores[2][Scores::bytes];
    KeyInfoTile<keys> key_info;
    typename Semaphore::Storage semaphore;
    typename Iterator::Storage iterator;
  };

  static long blocks(const Params& p) { return KeyTile::count(p.shape, keys); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    Mainloop mainloop(p, shared);
    const int group = p.shape.group_heads();
    // The heads of a group see the same keys and are visited together, unless a key mask or a key bias
    // differs among them.
    const auto differs_by_head = [](const Broadcast& b) { return !b.dense && b.head_q != 0; };
    const bool apart = differs_by_head(p.score.mask) || differs_by_head(p.score.bias);
    const int heads = apart ? 1 : group;
    for (int member = 0; member < group; member += heads)
      mainloop.visit(mainloop.tile.kv_head * group + member, heads);
    mainloop.semaphore.finish();
    mainloop.store();
  }

 private:
  using Warp = KeyMajorWarp<T, D, HasDense, SharedStorage>;

  // A query tile whose dS is not yet added to dq.
  struct Visit {
    QueryTilePosition at;
    std::int64_t index;  // number among the tiles of p.dq_accum, also its order index
    bool last_head;  // last of the heads whose tiles of the same queries are visited in sequence
  };

  struct Mainloop {
    __device__ Mainloop(const Params& params, SharedStorage& storage)
        : p(params),
          shared(storage),
          tile(p.shape, keys, Ordered ? KeyTile::all_heads(p.shape) : KeyTile::heads_of_l2(p.shape),
               Semaphore::take_work(p.order, storage.semaphore, Block::of_block())),
          semaphore(p.order, storage.semaphore, Block::of_block(), tile.before),
          warp(p, storage, tile),
          dense_gradient(p, tile, warp.role_warp) {
      clear(accum);
    }

    // Visits the query tiles of some heads. A tile's dS is added to dq and to a dense dbias during the next tile.
    __device__ void visit(int first_head, int heads) {
      load_keys(first_head);
      const QueryBounds bounds(shared.key_info);
      if (!bounds.all_seen()) clear_unseen_keys();
      Pipeline queries(
          shared.queries,
          Iterator(shared.iterator, p, tile, first_head, heads, bounds.touched_begin / rows * rows,
                   bounds.touched_end, warp.number == Tiles::role_warps),
          typename Pipeline::Loader(p, tile.batch));
      const Iterator& tiles = queries.tiles();
      if (warp.role == WarpRole::dv && tiles.has()) load_queries(queries, 0);
      clear_skipped(tiles, first_head, heads, -1);
      Visit previous{};
      for (int n = 0;; ++n) {
        const bool has_tile = tiles.has();
        const QueryTilePosition at = tiles.at();
        if (n > 0) semaphore.wait(static_cast<int>(previous.index));
        queries.acquire();
        if (n > 0) semaphore.advance(static_cast<int>(previous.index));
        if (warp.role == WarpRole::dk && n > 0) {
          add_dq(previous, n - 1);
          add_dense_gradient(previous, n - 1);
        }
        if (has_tile) {
          clean_queries(queries, n);
          const int number = tiles.number();
          queries.advance();
          clear_skipped(tiles, first_head, heads, number);
          compute(queries, n, at, bounds);
        }
        if (warp.role == WarpRole::dv && n > 0) add_dq(previous, n - 1);
        if (!has_tile) break;
        previous = {at, dq_tile(at), !tiles.has() || tiles.at().row != at.row};
      }
      if (warp.role == WarpRole::dk && p.dbias.data != nullptr && !p.dbias.dense)
        warp.key_bias_gradient.store(p, tile, first_head,
                                     [&](int m, int h) { return warp.key_of(m, h); });
    }

    // Stores dv over the rows of V, or dk over the rows of K, and from there to memory.
    __device__ void store() {
      const bool is_dv = warp.role == WarpRole::dv;
      const OutputRows& to = is_dv ? p.dv : p.dk;
      __syncthreads();  // all warps have read K and V
      if (to.data == nullptr) return;
      const std::uint32_t staged = shared_address(is_dv ? shared.v : shared.k);
      const float scale = is_dv ? 1.0f : p.score.scale;
      const int begin = warp.role_warp * warp_keys;
      copy_r2s<KeyRows, KeyOrder>(accum, staged, begin, 0, [&](float x, float y, int, int) {
        return pack_gradient<T>(x * scale, y * scale, p.saturate);
      });
      __syncwarp();
      copy_s2g<KeyRows>(ThreadGroup<warp_size>::of_warp(), staged, begin,
                        min(begin + warp_keys, p.shape.seqlen_k - tile.key), tile.key, to,
                        tile.batch, tile.kv_head, is_dv ? p.shape.value_dim : p.shape.head_dim);
    }

    // ---- Steps ----

    // Loads K, V and the key info of the block's keys.
    __device__ void load_keys(int head) {
      __syncthreads();  // all warps are done with the previous heads
      const auto key = [&](int r) { return tile.key + KeyOrder::key(r); };
      const auto exists = [&](int r) { return key(r) < p.shape.seqlen_k; };
      const Block block = Block::of_block();
      const auto copy = [&](const InputRows& from, int columns, std::byte* to) {
        const RowSource<KeyRows, Block> source(block, from, tile.batch, tile.kv_head, columns);
        copy_g2s(block, source, shared_address(to), exists, key);
      };
      copy(p.k, p.shape.head_dim, shared.k);
      copy(p.v, p.shape.value_dim, shared.v);
      if (threadIdx.x < keys) {
        KeyInfoLoader<T> key_info(p.score, p.shape, tile.batch, head, tile.kv_head);
        const int column = static_cast<int>(threadIdx.x);
        key_info.load(key(column), exists(column));
        key_info.store(shared.key_info, column, 0, p.shape.seqlen_q);
      }
      __syncthreads();
    }

    // Clears keys that no query sees, whose inf and NaN would be multiplied by the zeros of dS.
    __device__ void clear_unseen_keys() {
      cp_async_wait_all();
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < keys * KeyRows::chunks; i += threads) {
        const int row = i / KeyRows::chunks;
        if (shared.key_info.range[row].length == 0) {
          store_shared_16(shared_address(shared.k) + KeyRows::offset(row, i % KeyRows::chunks),
                          {0, 0, 0, 0});
        }
      }
    }

    // Starts the copy of the pipeline's next tile, which becomes tile n. The dv warps call it after P is in shared
    // memory, because the dk warps have more work.
    __device__ void load_queries(const Pipeline& queries, int n) {
      queries.load(n);
      if constexpr (HasDense) warp.dense_scores.load_mask(queries.tiles().at());
    }

    // Replaces non-finite elements of q and dout by 0.
    __device__ void clean_queries(const Pipeline& queries, int n) {
      if ((warp.flags & (dout_not_finite | q_not_finite)) == 0) return;
      const Block block = Block::of_block();
      if ((warp.flags & dout_not_finite) != 0)
        clear_non_finite<T, QueryRows>(block, queries.dout_tile(n));
      if ((warp.flags & q_not_finite) != 0)
        clear_non_finite<T, QueryRows>(block, queries.q_tile(n));
      __syncthreads();
    }

    // Computes a query tile and copies the next. Both roles compute the same two products of different tiles.
    __device__ void compute(const Pipeline& queries, int n, QueryTilePosition at,
                            const QueryBounds& bounds) {
      const bool is_dv = warp.role == WarpRole::dv;
      const std::uint32_t first = is_dv ? queries.q_tile(n) : queries.dout_tile(n);
      const std::uint32_t second = is_dv ? queries.dout_tile(n) : queries.q_tile(n);
      typename Warp::ScoreAccumulator x;    // S or dP
      typename Warp::ScoreOperand operand;  // P or dS
      if constexpr (HasDense) {
        if (is_dv) warp.dense_scores.copy_bias(at, warp.transfer_tile(n));
      }
      warp.template multiply_part<0>(first, x);
      if (is_dv) warp.compute_p(queries, n, at, bounds, x, operand);
      barrier_wait(1 + warp.role_warp, 2 * warp_size);  // P of the two warps is in shared memory
      if (!is_dv) {
        warp.template multiply_part<1>(first, x);
        warp.compute_ds(queries, n, x, operand);
      } else if (queries.tiles().has()) {
        load_queries(queries, n + 1);
      }
      multiply<T, rows>(accum, operand, OperandB<QueryRows, Major::mn>(second, 0));
    }

    // Adds dS of tile n, the tile of `visit`.
    __device__ void add_dq(const Visit& visit, int n) const {
      if (p.dq_accum == nullptr) return;
      accumulate_dq<T, D, Scores, KeyRows, Tiles::blocks_ahead>(
          p.dq_accum + visit.index * DqAccumLayout<D>::floats, warp.scores_tile(n),
          shared_address(shared.k), p.shape.head_dim);
    }

    __device__ void add_dense_gradient(const Visit& visit, int n) {
      if constexpr (HasDense) {
        if (dense_gradient.wanted())
          dense_gradient.add(visit.at, warp.scores_tile(n), visit.last_head);
      }
    }

    // Stores zeros to a dense dbias for the tiles that are skipped between tile `number` and the current tile.
    __device__ void clear_skipped(const Iterator& tiles, int first_head, int heads,
                                  int number) const {
      if constexpr (HasDense) {
        if (warp.role == WarpRole::dk && dense_gradient.wanted())
          dense_gradient.clear(first_head, heads, number, tiles.number());
      }
    }

    // The number of a query tile among the tiles of p.dq_accum.
    __device__ std::int64_t dq_tile(QueryTilePosition at) const {
      return (static_cast<std::int64_t>(tile.batch) * p.shape.heads_q + at.head) *
                 ceil_div(p.shape.seqlen_q, rows) +
             at.row / rows;
    }

    const Params& p;
    SharedStorage& shared;
    const KeyTile tile;
    const Semaphore semaphore;  // orders the additions to dq
    Warp warp;
    Accumulator<warp_keys, D> accum;  // dv or dk
    std::conditional_t<HasDense, DenseBiasGradient<T, D>, Empty> dense_gradient;
  };
};

}  // namespace flash_dmattn::cuda::sm80
