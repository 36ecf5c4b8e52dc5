#pragma once

#include "cuda/common/bias_gradient.cuh"
#include "cuda/common/dense_elements.cuh"
#include "cuda/common/fp64_fallback.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/scheduler.cuh"
#include "cuda/common/semaphore.cuh"
#include "cuda/common/tile_copy.cuh"
#include "cuda/sm80/kv_pipeline.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/policy.h"
#include "cuda/sm80/query_tiles.cuh"

namespace flash_dmattn::cuda::sm80 {

// A block holds a tile of queries of one head and walks the key tiles that the forward walked. dq
// stays in its accumulators; the rows of dk and dv that a key tile receives are complete over the
// block's queries and are added in fp32 to sums in memory, where the heads of a group and the query
// tiles meet. `Pairs`: the mask or the bias has a query dimension. `Ordered`: the blocks take turns at
// adding, so that the sums are the same in every run.
template <class T, int D, BackwardPolicy P, bool Pairs, bool Ordered>
struct BackwardKernel {
  using Params = QueryMajorParams;
  static constexpr int threads = P.warps * 32;
  static constexpr int min_blocks = P.min_blocks;

  using QueryRows = SharedTile<P.rows, D>;
  using Scores = SharedTile<P.rows, P.keys>;
  using Group = ThreadGroup<threads>;
  using Iterator = KeyTileIterator<P.keys, KeySource::either, EveryTile>;
  using Pipeline = KvPipeline<T, D, Iterator, P.stages, threads, InOrder, NoExtra,
                              typename OrderSemaphore<Ordered, threads>::Storage>;
  using KeyRows = typename Pipeline::RowTile;

  using Semaphore = OrderSemaphore<Ordered, threads>;

  struct SharedStorage {
    alignas(1024) std::byte q[QueryRows::bytes];
    alignas(1024) std::byte dout[QueryRows::bytes];
    alignas(1024) std::byte p[Scores::bytes];
    alignas(1024) std::byte dt[Scores::bytes];
    typename Pipeline::Storage kv;
  };

  // A warp's part of an M x N tile that is split over a grid of warps with `Rows` rows.
  template <int M, int N, int Rows>
  struct WarpTile {
    static constexpr int m = M / Rows;
    static constexpr int n = N / (P.warps / Rows);
    using Accumulators = Accumulator<m, n>;
    static __device__ int row() { return warp_id() % Rows * m; }
    static __device__ int column() { return warp_id() / Rows * n; }
  };
  using ScoreTile = WarpTile<P.rows, P.keys, P.score_warps>;
  using KeyTile = WarpTile<P.keys, D, P.key_warps>;
  using QueryTilePart = WarpTile<P.rows, D, P.query_warps>;
  static constexpr int m16 = ScoreTile::m / 16;
  static constexpr int n8 = ScoreTile::n / 8;

  static long blocks(const Params& p) { return QueryTile::count(p.shape, P.rows); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const QueryTile tile(
        p.shape, P.rows, Ordered || walks_neighbours(p),
        Semaphore::take_work(p.turns, shared.kv.tail, Semaphore::Group::of_block()));
    const int row_end = min(tile.row + P.rows, p.shape.seqlen_q);
    const std::uint32_t q_tile = shared_address(shared.q);
    const std::uint32_t dout_tile = shared_address(shared.dout);
    const std::uint32_t p_tile = shared_address(shared.p);
    const std::uint32_t dt_tile = shared_address(shared.dt);

    const auto query = [&](int r) { return tile.row + r; };
    const Group block = Group::of_block();
    const auto copy = [&](const InputRows& rows, std::uint32_t to) {
      const RowSource<QueryRows, Group> source(block, rows, tile.batch, tile.head,
                                               p.shape.head_dim);
      copy_g2s(block, source, to, row_end - tile.row, query);
    };
    copy(p.q, q_tile);
    copy(p.dout, dout_tile);
    const KeyInfoLoader<T> key_info_loader(p.score, p.shape, tile.batch, tile.head, tile.kv_head);
    Pipeline kv(shared.kv,
                Iterator(TileKeys(p, tile, row_end), EveryTile(), key_info_loader.has_values()),
                typename Pipeline::Loader(block, shared.kv.loader, p, tile.batch, tile.kv_head),
                key_info_loader, NoExtra(), tile.row, row_end);
    kv.start();
    const std::uint32_t flags = *p.flags;
    if ((flags & dout_not_finite) != 0) clear_non_finite<T, QueryRows, threads>(dout_tile);
    if ((flags & q_not_finite) != 0) clear_non_finite<T, QueryRows, threads>(q_tile);

    typename QueryTilePart::Accumulators dq;
    clear(dq);
    const RowStatistics rows(p, flags, tile, tile.row + ScoreTile::row(), row_end);
    const LanePosition position =
        LanePosition::of(tile.row + ScoreTile::row(), ScoreTile::column());

    const Semaphore semaphore(p.turns, shared.kv.tail, Semaphore::Group::of_block(),
                              tile.before_of_keys, p.turns.across_heads ? tile.before_of_rows : -1);
    const bool in_places = Ordered && has_ascending_keys(p.plan, tile);
    clear_pair_gradients(p, tile, row_end, 0, kv.begin() * P.keys);
    for (int n = kv.begin(); kv.has(n); ++n) {
      const int place = in_places ? kv.key(n, kv.size(n) - 1) : last_order_index;
      kv.acquire(n);
      if (in_places) semaphore.advance(place);
      const std::uint32_t state = kv.state(n);
      if ((state & KeyInfoTile<P.keys>::touched) != 0) {
        score_step(p, tile, shared, kv, n, state, rows, position, semaphore, place);
        semaphore.wait(place);
        __syncthreads();
        const SumRows sum_rows(p, tile, kv, n);
        add_rows(p, p.dv_sum, sum_rows, p_tile, dout_tile);
        add_rows(p, p.dk_sum, sum_rows, dt_tile, q_tile);
        multiply<T, P.keys>(dq, OperandA<Scores, Major::k>(dt_tile, QueryTilePart::row()),
                            OperandB<KeyRows, Major::mn>(kv.k_tile(n), QueryTilePart::column()));
      } else {
        semaphore.wait(place);
        clear_pair_gradients(p, tile, row_end, n * P.keys, n * P.keys + kv.size(n));
      }
      kv.release(n);
    }
    cp_async_wait_all();
    semaphore.finish();
    clear_pair_gradients(p, tile, row_end, kv.tiles().end(), p.shape.seqlen_k);
    if (p.dq.data == nullptr) return;
    __syncthreads();  // all have read q
    float check = 0;
    copy_r2s<QueryRows>(dq, q_tile, QueryTilePart::row(), QueryTilePart::column(),
                        [&](float x, float y, int, int) {
                          check += zero_if_finite(x, y);
                          return pack_gradient<T>(x * p.score.scale, y * p.score.scale, p.saturate);
                        });
    if (check != 0) atomicOr(p.flags, dq_not_finite);
    __syncthreads();
    copy_s2g<QueryRows>(block, q_tile, 0, row_end - tile.row, tile.row, p.dq, tile.batch, tile.head,
                        p.shape.head_dim);
  }

 private:
  // Whether the keys that the block walks are its places (common/turns.cuh): the full and the partial
  // keys of a plan ascend, each by themselves.
  static __device__ bool has_ascending_keys(const QueryTileLists& plan, const QueryTile& tile) {
    if (plan.keys == nullptr) return true;
    const std::int64_t list = tile.batch * plan.stride_batch + tile.kv_head * plan.stride_head +
                              tile.row / static_cast<int>(plan.tile_rows);
    const int* const keys = plan.keys + plan.begin[list];
    const int full = plan.full[list];
    return full == 0 || full == plan.count[list] || keys[full - 1] < keys[full];
  }

  // Calls body() in all warps: in those of number 0 first, then 1, ... `count` - 1 if order matters.
  template <class Body>
  static __device__ void one_by_one(int number, int count, const Body& body) {
    for (int i = 0; i < (Ordered ? count : 1); ++i) {
      if (!Ordered || i == number) body();
      if (Ordered) __syncthreads();
    }
  }

  // lse and delta of the rows of a lane's score accumulators.
  struct RowStatistics {
    float lse2[m16][2];
    float low[m16][2];
    float delta[m16][2];
    bool has_low;
    bool extreme;

    __device__ RowStatistics(const Params& p, std::uint32_t flags, const QueryTile& tile,
                             int warp_row, int row_end)
        : has_low((flags & lse_has_low) != 0), extreme((flags & lse_is_extreme) != 0) {
      const std::int64_t begin =
          (static_cast<std::int64_t>(tile.batch) * p.shape.heads_q + tile.head) * p.shape.seqlen_q;
#pragma unroll
      for (int m = 0; m < m16; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = warp_row + 16 * m + 8 * h + lane_id() / 4;
          const bool exists = row < row_end;
          lse2[m][h] = exists ? p.lse2[begin + row] : -negative_infinity;
          low[m][h] = exists && has_low ? p.lse2_low[begin + row] : 0;
          delta[m][h] = exists ? p.delta[begin + row] : 0;
        }
      }
    }
  };

  // Probabilities and dt of the score tile, to shared memory; ds to dbias on the way.
  static __device__ void score_step(const Params& p, const QueryTile& tile, SharedStorage& shared,
                                    const Pipeline& kv, int n, std::uint32_t state,
                                    const RowStatistics& rows, LanePosition position,
                                    const Semaphore& semaphore, int place) {
    const auto& key_info = kv.key_info(n);
    typename ScoreTile::Accumulators x;
    clear(x);
    multiply<T, D>(x, OperandA<QueryRows, Major::k>(shared_address(shared.q), ScoreTile::row()),
                   OperandB<KeyRows, Major::k>(kv.k_tile(n), ScoreTile::column()));
    shape_scores(p.score, x);
    typename ScoreTile::Accumulators slope;
    const bool capped = p.score.form == ScoreForm::capped;
    if (capped) {
      // At least 0; 0 instead of a NaN, which would meet the zeros of ds.
      for_each_element(x, [&](float& t, int m, int k, int e) {
        slope[m][k][e] = __saturatef(fmaf(-t, t, 1.0f));
      });
    }
    const bool biased = p.score.bias.data != nullptr;
    if (biased && !(Pairs && p.score.bias.per_query)) {
      add_column_bias(p.score.factor, key_info, position, x);
    }
    if constexpr (Pairs) {
      DenseElements<T, typename Pipeline::Positions>(p.score, tile, p.shape.seqlen_q, kv.size(n),
                                                     kv.positions(n))
          .apply_x2(key_info, (state & key_info.partial) != 0, position, x);
    }
    if ((state & key_info.partial) != 0) mask_columns(key_info, position, x);
    // The forward's instructions in the forward's order, so that s and lse fit together.
    const float factor = p.score.exponent;
    if (rows.has_low) {
      for_each_element(x, [&](float& s, int m, int k, int e) {
        const int row = position.row + 16 * m + 8 * (e / 2);
        const int column = position.column + 8 * k + e % 2;
        const bool may_overflow = rows.extreme && row < p.shape.seqlen_q && column < kv.size(n);
        s = probability_with_fallback<T, Pairs>(p, {tile.batch, tile.head, tile.kv_head}, row,
                                                may_overflow ? kv.key(n, column) : 0, may_overflow,
                                                s, rows.lse2[m][e / 2], rows.low[m][e / 2]);
      });
    } else {
      for_each_element(x, [&](float& s, int m, int, int e) {
        s = exp2_approx(fmaf(s, factor, -rows.lse2[m][e / 2]));
      });
    }
    // At most 1; a NaN, of a score that overflowed far below the maximum, becomes 0.
    for_each_element(x, [&](float& s, int, int, int) { s = __saturatef(s); });
    copy_r2s<Scores>(x, shared_address(shared.p), ScoreTile::row(), ScoreTile::column(),
                     [](float a, float b, int, int) { return pack<T>(a, b); });

    typename ScoreTile::Accumulators ds;
    clear(ds);
    multiply<T, D>(ds, OperandA<QueryRows, Major::k>(shared_address(shared.dout), ScoreTile::row()),
                   OperandB<KeyRows, Major::k>(kv.v_tile(n), ScoreTile::column()));
    for_each_element(ds, [&](float& s, int m, int k, int e) {
      const float probability = x[m][k][e];
      s = probability == 0 ? 0.0f : probability * (s - rows.delta[m][e / 2]);
    });
    if (p.dbias.data != nullptr) {
      if (Ordered && p.dbias_add) {
        semaphore.wait(place);
        __syncthreads();
      }
      if (Pairs && p.dbias.per_query && p.dbias.key == 0 && p.dbias_add) {
        add_row_gradients(p, tile, position, ds);
      } else if (Pairs && p.dbias.per_query) {
        store_pair_gradients(p, tile, kv.positions(n), kv.size(n), position, ds);
      } else {
        add_column_gradients(p, tile, kv, n, position, ds);
      }
    }
    if (capped) {
      for_each_element(ds, [&](float& s, int m, int k, int e) { s *= slope[m][k][e]; });
    }
    copy_r2s<Scores>(
        ds, shared_address(shared.dt), ScoreTile::row(), ScoreTile::column(),
        [&](float a, float b, int, int) { return pack_gradient<T>(a, b, p.saturate); });
  }

  static __device__ std::int64_t dbias_begin(const Params& p, const QueryTile& tile) {
    return tile.batch * p.dbias.batch + tile.head * p.dbias.head_q + tile.kv_head * p.dbias.head_kv;
  }

  // The gradient of a per-key bias: column sums over the warp's rows, added in memory.
  static __device__ void add_column_gradients(const Params& p, const QueryTile& tile,
                                              const Pipeline& kv, int n, LanePosition position,
                                              const typename ScoreTile::Accumulators& ds) {
    // Sums of this lane's columns over its rows, then over the eight lanes that share the columns:
    // at each step a lane passes on one half of its sums and keeps the other.
    constexpr int count = 2 * n8;
    float sum[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      sum[i] = 0;
#pragma unroll
      for (int m = 0; m < m16; ++m) sum[i] += ds[m][i / 2][i % 2] + ds[m][i / 2][i % 2 + 2];
    }
    const int lane = lane_id();
    int held = 0;  // sum[0] is of the lane's column number `held`
    int left = count;
#pragma unroll
    for (int step = 16; step >= 4; step /= 2) {
      const bool upper = (lane & step) != 0;
      if (left > 1) {
        left /= 2;
#pragma unroll
        for (int i = 0; i < count / 2; ++i) {
          if (i >= left) break;
          const float kept = upper ? sum[i + left] : sum[i];
          const float passed = upper ? sum[i] : sum[i + left];
          sum[i] = kept + shuffle_xor(passed, step);
        }
        held += upper ? left : 0;
      } else {
        sum[0] += shuffle_xor(sum[0], step);
      }
    }
    // With fewer columns than lanes to share them, several lanes hold the same sum.
    constexpr int sharing = count < 8 ? 8 / count : 1;
    float* const sums = reinterpret_cast<float*>(p.dbias.data) + dbias_begin(p, tile);
    one_by_one(ScoreTile::row() / ScoreTile::m, P.score_warps, [&] {
#pragma unroll
      for (int i = 0; i < (count + 7) / 8; ++i) {
        const int column = position.column + (held + i) / 2 * 8 + (held + i) % 2;
        if (lane / 4 % sharing == 0 && column < kv.size(n) && sum[i] != 0) {
          atomicAdd(sums + kv.key(n, column) * p.dbias.key, sum[i]);
        }
      }
    });
  }

  // The gradient of a bias that all keys of a query share: row sums over the warp's columns.
  static __device__ void add_row_gradients(const Params& p, const QueryTile& tile,
                                           LanePosition position,
                                           const typename ScoreTile::Accumulators& ds) {
    float* const sums = reinterpret_cast<float*>(p.dbias.data) + dbias_begin(p, tile);
    float sum[m16][2];
#pragma unroll
    for (int m = 0; m < m16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[m][h] = 0;
#pragma unroll
        for (int k = 0; k < n8; ++k) sum[m][h] += ds[m][k][2 * h] + ds[m][k][2 * h + 1];
        sum[m][h] = quad_sum(sum[m][h]);
      }
    }
    constexpr int warp_columns = P.warps / P.score_warps;
    one_by_one(ScoreTile::column() / ScoreTile::n, warp_columns, [&] {
#pragma unroll
      for (int m = 0; m < m16; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = position.row + 16 * m + 8 * h;
          if (threadIdx.x % 4 == 0 && row < p.shape.seqlen_q && sum[m][h] != 0) {
            atomicAdd(sums + row * p.dbias.query, sum[m][h]);
          }
        }
      }
    });
  }

  // The gradient of a bias with a query dimension, of every pair of the tile.
  static __device__ void store_pair_gradients(const Params& p, const QueryTile& tile,
                                              const typename Pipeline::Positions& keys, int size,
                                              LanePosition position,
                                              typename ScoreTile::Accumulators& ds) {
    const std::int64_t begin = dbias_begin(p, tile);
#pragma unroll
    for (int m = 0; m < m16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = position.row + 16 * m + 8 * h;
        if (row >= p.shape.seqlen_q) continue;
        const std::int64_t row_begin = begin + row * p.dbias.query;
#pragma unroll
        for (int k = 0; k < n8; ++k) {
          const int column = position.column + 8 * k;
          const float first = ds[m][k][2 * h];
          const float second = ds[m][k][2 * h + 1];
          if (p.dbias.in_pairs && p.plan.keys == nullptr && !p.dbias_add && column + 1 < size) {
            store_gradient_pair<T>(p.dbias, row_begin + keys[column], first, second, p.saturate);
          } else {
            if (column < size) {
              store_gradient<T>(p.dbias, row_begin + keys[column] * p.dbias.key, first, p.dbias_add,
                                p.saturate);
            }
            if (column + 1 < size) {
              store_gradient<T>(p.dbias, row_begin + keys[column + 1] * p.dbias.key, second,
                                p.dbias_add, p.saturate);
            }
          }
        }
      }
    }
  }

  // Zeros in dbias for keys [begin, end) and the block's rows, where no tile is computed.
  static __device__ void clear_pair_gradients(const Params& p, const QueryTile& tile, int row_end,
                                              int begin, int end) {
    if (!Pairs || p.dbias.data == nullptr || !p.dbias.per_query || p.dbias_add ||
        p.plan.keys != nullptr) {
      return;
    }
    const std::int64_t first = dbias_begin(p, tile);
    for (int row = tile.row + warp_id(); row < row_end; row += P.warps) {
      for (int key = begin + lane_id(); key < end; key += 32) {
        store_gradient<T>(p.dbias, first + row * p.dbias.query + key * p.dbias.key, 0, false, true);
      }
    }
  }

  // Where the rows of a lane's accumulators lie in the sums; the same for dk and dv.
  struct SumRows {
    static constexpr int m16 = KeyTile::m / 16;
    std::int64_t offset[m16][2];
    bool exists[m16][2];
    bool whole;

    __device__ SumRows(const Params& p, const QueryTile& tile, const Pipeline& kv, int n) {
      const int lane = lane_id();
      const int columns = sum_columns(p.shape.head_dim);
      whole = kv.size(n) >= P.keys && columns == D;
      const std::int64_t head =
          (static_cast<std::int64_t>(tile.batch) * p.shape.heads_kv + tile.kv_head) *
              p.shape.seqlen_k * columns +
          KeyTile::column() + 4 * (lane % 4);
#pragma unroll
      for (int m = 0; m < m16; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = KeyTile::row() + 16 * m + 8 * h + lane / 4;
          exists[m][h] = row < kv.size(n);
          offset[m][h] = head + static_cast<std::int64_t>(kv.key(n, row)) * columns;
        }
      }
    }
  };

  // Adds left^T right, [keys, D], to the sums of the key tile's rows.
  static __device__ void add_rows(const Params& p, float* sums, const SumRows& rows,
                                  std::uint32_t left, std::uint32_t right) {
    if (sums == nullptr) return;
    typename KeyTile::Accumulators c;
    clear(c);
    multiply<T, P.rows>(c, OperandA<Scores, Major::mn>(left, KeyTile::row()),
                        OperandB<QueryRows, Major::mn>(right, KeyTile::column()));
    if (rows.whole) {
      add_accumulators<true>(sums, rows, D, c);
    } else {
      add_accumulators<false>(sums, rows, sum_columns(p.shape.head_dim), c);
    }
  }

  // Whole: all rows and columns exist. Without branches the moves that line operands up for one
  // addition do not wait for the one before to have read its own.
  template <bool Whole>
  static __device__ void add_accumulators(float* sums, const SumRows& rows, int columns,
                                          const typename KeyTile::Accumulators& c) {
#pragma unroll
    for (int m = 0; m < KeyTile::m / 16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (!Whole && !rows.exists[m][h]) continue;
        float* const to = sums + rows.offset[m][h];
#pragma unroll
        for (int d = 0; d < KeyTile::n / 8; d += 2) {
          // A lane's four columns of two accumulator blocks lie side by side in the sums.
          if (Whole || KeyTile::column() + 8 * d < columns) {
            reduce_add(to + 8 * d, c[m][d][2 * h], c[m][d][2 * h + 1], c[m][d + 1][2 * h],
                       c[m][d + 1][2 * h + 1]);
          }
        }
      }
    }
  }
};

}  // namespace flash_dmattn::cuda::sm80
