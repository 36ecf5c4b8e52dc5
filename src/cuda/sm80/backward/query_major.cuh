#pragma once

#include "cuda/attention/query_head.h"
#include "cuda/attention/scheduler.cuh"
#include "cuda/primitives/semaphore.cuh"
#include "cuda/primitives/tile_copy.cuh"
#include "cuda/sm80/backward/dkv_accumulate.cuh"
#include "cuda/sm80/backward/query_major_bias_gradient.cuh"
#include "cuda/sm80/dense/elements.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/policy.h"
#include "cuda/sm80/tile/clear_non_finite.cuh"
#include "cuda/sm80/tile/fragment.cuh"
#include "cuda/sm80/tile/kv_pipeline.cuh"
#include "cuda/sm80/tile/warp_tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// lse and delta of the rows of a lane's score accumulators, which begin at query `warp_row`.
template <int M16>
struct QueryRowValues {
  float lse_log2[M16][2];
  float lse_low[M16][2];
  float delta[M16][2];

  __device__ QueryRowValues(const BackwardParams& p, QueryHead head, int warp_row, int row_end,
                            bool has_low) {
    const std::int64_t begin = head.row_index(p.shape, 0);
#pragma unroll
    for (int m = 0; m < M16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp_row + 16 * m + 8 * h + lane_id() / 4;
        const bool exists = row < row_end;
        lse_log2[m][h] = exists ? p.lse_log2[begin + row] : -negative_infinity;
        lse_low[m][h] = exists && has_low ? p.lse_log2_low[begin + row] : 0;
        delta[m][h] = exists ? p.delta[begin + row] : 0;
      }
    }
  }
};

// The query-major backward. A block owns a tile of queries of one head and visits the key tiles that the forward
// visited. dq stays in accumulators. A key tile's rows of dk and dv are summed over the block's queries and added to
// fp32 sums in memory, over the heads of a group and the query tiles. With `HasDense`, the mask or the bias has a query
// dimension. With `Ordered`, additions have a fixed order.
template <class T, int D, BackwardPolicy P, bool HasDense, bool Ordered>
struct QueryMajorBackwardKernel {
  using Params = QueryMajorParams;
  static constexpr int threads = P.warps * warp_size;
  static constexpr int min_blocks = 1;

  using Block = ThreadGroup<threads>;
  using Semaphore = OrderSemaphore<Ordered, threads>;
  using QueryRows = SharedTile<P.rows, D>;
  using Scores = SharedTile<P.rows, P.keys>;
  using Iterator = KeyTileIterator<P.keys, KvSource::either, EveryTile>;
  using Pipeline =
      KvPipeline<T, D, Iterator, P.stages, threads, InOrder, NoExtra, typename Semaphore::Storage>;
  using KeyRows = typename Pipeline::RowTile;

  struct SharedStorage {
    alignas(1024) std::byte q[QueryRows::bytes];
    alignas(1024) std::byte dout[QueryRows::bytes];
    alignas(1024) std::byte p[Scores::bytes];
    alignas(1024) std::byte ds[Scores::bytes];
    typename Pipeline::Storage kv;
  };

  static long blocks(const Params& p) { return QueryTile::count(p.shape, P.rows); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    Mainloop(p, shared).run();
  }

 private:
  // The tiles that the warps divide: S and dS, dk and dv, dq.
  using ScoreTile = WarpTile<P.warps, P.rows, P.keys, P.row_warps>;
  using DkvTile = WarpTile<P.warps, P.keys, D, 2>;
  using DqTile = WarpTile<P.warps, P.rows, D, P.row_warps>;
  using ScoreAccumulators = typename ScoreTile::Accumulators;
  using BiasGradient = QueryMajorBiasGradient<T, ScoreTile, HasDense, Ordered>;
  using RowValues = QueryRowValues<ScoreTile::m / 16>;

  struct Mainloop {
    __device__ Mainloop(const Params& params, SharedStorage& storage)
        : p(params),
          shared(storage),
          tile(p.shape, P.rows, Ordered || neighbours_share_keys(p),
               Semaphore::take_work(p.order, storage.kv.tail, Block::of_block())),
          row_end(min(tile.row + P.rows, p.shape.seqlen_q)),
          position(LanePosition::of(tile.row + ScoreTile::row(), ScoreTile::column())) {}

    __device__ void run() {
      const Block block = Block::of_block();
      load_queries(block);
      const KeyInfoLoader<T> key_info(p.score, p.shape, tile.batch, tile.head, tile.kv_head);
      Pipeline kv(shared.kv,
                  Iterator(TileKeys(p, tile, row_end), EveryTile(), key_info.has_values()),
                  typename Pipeline::Loader(block, shared.kv.loader, p, tile.batch, tile.kv_head),
                  key_info, NoExtra(), tile.row, row_end);
      kv.start();
      const std::uint32_t flags = *p.flags;
      clean_queries(block, flags);
      const RowValues rows(p, head(), tile.row + ScoreTile::row(), row_end,
                           (flags & lse_is_large) != 0);
      const Semaphore semaphore(p.order, shared.kv.tail, block, tile.before_of_keys,
                                p.order.across_heads ? tile.before_of_rows : -1);
      const BiasGradient dbias(p, tile);
      typename DqTile::Accumulators dq;
      clear(dq);

      dbias.clear(row_end, P.warps, 0, kv.begin() * P.keys);
      for (int n = kv.begin(); kv.has(n); ++n) {
        // The last key of the tile is its order index. Lists of a deterministic call go by position.
        const int order = Ordered ? kv.key(n, kv.size(n) - 1) : 0;
        kv.acquire(n);
        if (Ordered) semaphore.advance(order);
        if ((kv.state(n) & Pipeline::KeyInfo::touched) != 0) {
          ScoreAccumulators probabilities;
          ScoreAccumulators slopes;
          compute_p(kv, n, rows, flags, probabilities, slopes);
          ScoreAccumulators ds;
          compute_ds(kv, n, rows, probabilities, ds);
          if (dbias.wanted()) {
            if (Ordered && p.dbias_accumulates) {
              semaphore.wait(order);
              __syncthreads();
            }
            if (p.score.bias_delay == 0) {
              dbias.add(kv.positions(n), kv.size(n), ds);
            } else {
              add_delayed_dbias(kv, n, dbias, ds);
            }
          }
          store_ds(slopes, ds);
          semaphore.wait(order);
          __syncthreads();
          add_dkv(kv, n);
          multiply<T, P.keys>(dq,
                              OperandA<Scores, Major::k>(shared_address(shared.ds), DqTile::row()),
                              OperandB<KeyRows, Major::mn>(kv.k_tile(n), DqTile::column()));
        } else {
          semaphore.wait(order);
          dbias.clear(row_end, P.warps, n * P.keys, n * P.keys + kv.size(n));
        }
        kv.release(n);
      }
      cp_async_wait_all();
      semaphore.finish();
      dbias.clear(row_end, P.warps, kv.tiles().end(), p.shape.seqlen_k);
      store_dq(block, dq);
    }

    __device__ void load_queries(Block block) const {
      const auto copy = [&](const InputRows& rows, int columns, std::byte* to) {
        const RowSource<QueryRows, Block> source(block, rows, tile.batch, tile.head, columns);
        copy_g2s(block, source, shared_address(to), row_end - tile.row,
                 [&](int r) { return tile.row + r; });
      };
      copy(p.q, p.shape.head_dim, shared.q);
      copy(p.dout, p.shape.value_dim, shared.dout);
    }

    // Replaces non-finite elements of q and dout by 0.
    __device__ void clean_queries(Block block, std::uint32_t flags) const {
      if ((flags & dout_not_finite) != 0)
        clear_non_finite<T, QueryRows>(block, shared_address(shared.dout));
      if ((flags & q_not_finite) != 0)
        clear_non_finite<T, QueryRows>(block, shared_address(shared.q));
    }

    // Computes P of a key tile, also in shared memory, and the slope of a softcap.
    __device__ void compute_p(const Pipeline& kv, int n, const RowValues& rows, std::uint32_t flags,
                              ScoreAccumulators& x, ScoreAccumulators& slopes) const {
      clear(x);
      multiply<T, D>(x, OperandA<QueryRows, Major::k>(shared_address(shared.q), ScoreTile::row()),
                     OperandB<KeyRows, Major::k>(kv.k_tile(n), ScoreTile::column()));
      shape_scores(p.score, x);
      if (has_softcap()) {
        // The slope is at least 0, and 0 instead of NaN, which the zeros of dS would be multiplied by.
        for_each_element(x, [&](float& tanh, int m, int k, int e) {
          slopes[m][k][e] = __saturatef(fmaf(-tanh, tanh, 1.0f));
        });
      }
      const bool large_lse = (flags & lse_is_large) != 0;
      finish_scores(kv, n, large_lse, x);
      large_lse ? exponentiate_large(kv, n, rows, x) : exponentiate(rows, x);
      copy_r2s<Scores>(x, shared_address(shared.p), ScoreTile::row(), ScoreTile::column(),
                       [](float a, float b, int, int) { return pack<T>(a, b); });
    }

    __device__ bool has_key_bias() const {
      return p.score.bias.data != nullptr && !(HasDense && p.score.bias.dense);
    }

    // Adds biases, and sets scores to -inf where masked. With a large lse, exponentiate_large() adds biases of keys.
    __device__ void finish_scores(const Pipeline& kv, int n, bool large_lse,
                                  ScoreAccumulators& x) const {
      const auto& key_info = kv.key_info(n);
      const bool partial = (kv.state(n) & key_info.partial) != 0;
      if (has_key_bias() && !large_lse) {
        if (p.score.bias_delay == 0) {
          add_column_bias(p.score.factor, &key_info.bias[position.column], x);
        } else {
          add_delayed_column_bias(
              p.score.factor, key_info, [](int, int) { return 0.0f; }, position.column,
              [&](int column) { return key_bias_begin(kv, n, column); },
              [&](int m, int h) { return position.row + 16 * m + 8 * h; }, x);
        }
      }
      if constexpr (HasDense) {
        DenseElements<T, typename Pipeline::Positions>(p.score, tile, p.shape.seqlen_q, kv.size(n),
                                                       kv.positions(n))
            .apply_x2(key_info, partial, position, x);
      }
      if (partial) mask_columns(key_info, position, x);
    }

    // The first query for which the delayed bias of a column's key counts.
    __device__ int key_bias_begin(const Pipeline& kv, int n, int column) const {
      return delayed_bias_begin(p.score, p.shape, kv.key(n, column));
    }

    __device__ void add_delayed_dbias(const Pipeline& kv, int n, const BiasGradient& dbias,
                                      const ScoreAccumulators& ds) const {
      ScoreAccumulators biased;
      for_each_element(biased, [&](float& x, int m, int k, int e) {
        const int begin = key_bias_begin(kv, n, position.column + 8 * k + e % 2);
        x = position.row + 16 * m + 8 * (e / 2) >= begin ? ds[m][k][e] : 0.0f;
      });
      dbias.add(kv.positions(n), kv.size(n), biased);
    }

    // Computes P by the same instructions in the same order as the forward, so that s and lse are consistent. P is at
    // most 1, and NaN, from a score that overflowed far below the maximum, becomes 0.
    __device__ void exponentiate(const RowValues& rows, ScoreAccumulators& x) const {
      for_each_element(x, [&](float& s, int m, int, int e) {
        s = __saturatef(exp2_approx(fmaf(s, p.score.final_log2_scale, -rows.lse_log2[m][e / 2])));
      });
    }

    // The same in a call with a large lse, which is the sum of two floats. The difference of bias and lse is computed first,
    // as it is exact where P is not small.
    __device__ void exponentiate_large(const Pipeline& kv, int n, const RowValues& rows,
                                       ScoreAccumulators& x) const {
      const bool has_bias = has_key_bias();
      const float factor = has_bias ? p.score.factor : p.score.final_log2_scale;
      for_each_element(x, [&](float& s, int m, int k, int e) {
        const int column = position.column + 8 * k + e % 2;
        float bias = has_bias ? kv.key_info(n).bias[column] : 0;
        if (has_bias && p.score.bias_delay != 0) {
          const int query = position.row + 16 * m + 8 * (e / 2);
          if (query < key_bias_begin(kv, n, column)) bias = 0;
        }
        const float rest = fmaf(bias, log2e_low, -rows.lse_low[m][e / 2]);
        const float high = fmaf(bias, log2e, -rows.lse_log2[m][e / 2]);
        s = __saturatef(exp2_approx(fmaf(s, factor, high) + rest));
      });
    }

    // Computes dS = P (dP - delta), which is 0 where P is 0, even if dP is not finite.
    __device__ void compute_ds(const Pipeline& kv, int n, const RowValues& rows,
                               const ScoreAccumulators& probabilities,
                               ScoreAccumulators& ds) const {
      clear(ds);
      multiply<T, D>(ds,
                     OperandA<QueryRows, Major::k>(shared_address(shared.dout), ScoreTile::row()),
                     OperandB<KeyRows, Major::k>(kv.v_tile(n), ScoreTile::column()));
      for_each_element(ds, [&](float& x, int m, int k, int e) {
        const float probability = probabilities[m][k][e];
        x = probability == 0 ? 0.0f : probability * (x - rows.delta[m][e / 2]);
      });
    }

    // Stores the derivative with respect to scale q . k to shared memory.
    __device__ void store_ds(const ScoreAccumulators& slopes, ScoreAccumulators& ds) const {
      if (has_softcap())
        for_each_element(ds, [&](float& x, int m, int k, int e) { x *= slopes[m][k][e]; });
      copy_r2s<Scores>(
          ds, shared_address(shared.ds), ScoreTile::row(), ScoreTile::column(),
          [&](float a, float b, int, int) { return pack_gradient<T>(a, b, p.saturate); });
    }

    __device__ void add_dkv(const Pipeline& kv, int n) const {
      const DkvAccumulator<T, D, DkvTile, Scores, QueryRows> sums(
          p, tile, kv.size(n), [&](int r) { return kv.key(n, r); });
      sums.add(p.dv_accum, shared_address(shared.p), shared_address(shared.dout));
      sums.add(p.dk_accum, shared_address(shared.ds), shared_address(shared.q));
    }

    __device__ void store_dq(Block block, const typename DqTile::Accumulators& dq) const {
      if (p.dq.data == nullptr) return;
      __syncthreads();  // all warps have read q
      const std::uint32_t staged = shared_address(shared.q);
      float check = 0;
      copy_r2s<QueryRows>(
          dq, staged, DqTile::row(), DqTile::column(), [&](float x, float y, int, int) {
            check += zero_if_finite(x, y);
            return pack_gradient<T>(x * p.score.scale, y * p.score.scale, p.saturate);
          });
      if (check != 0) atomicOr(p.flags, dq_not_finite);
      __syncthreads();
      copy_s2g<QueryRows>(block, staged, 0, row_end - tile.row, tile.row, p.dq, tile.batch,
                          tile.head, p.shape.head_dim);
    }

    __device__ QueryHead head() const { return {tile.batch, tile.head, tile.kv_head}; }
    __device__ bool has_softcap() const { return p.score.form == ScoreForm::capped; }

    const Params& p;
    SharedStorage& shared;
    const QueryTile tile;
    const int row_end;
    const LanePosition position;
  };
};

}  // namespace flash_dmattn::cuda::sm80
