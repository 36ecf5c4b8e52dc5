#pragma once

#include "cuda/common/fragment.cuh"
#include "cuda/common/scheduler.cuh"
#include "cuda/common/tile_copy.cuh"
#include "cuda/common/turns.cuh"
#include "cuda/policy.h"
#include "cuda/sm80/handed_scores.cuh"
#include "cuda/sm80/key_rows.cuh"
#include "cuda/sm80/pair_gradients.cuh"
#include "cuda/sm80/pair_rows.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/query_tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// A block owns 128 keys of a kv head and walks the query tiles, of all heads of the group, that can
// see them. dk, dv and the gradient of a per-key bias stay in accumulators and are complete at the
// end; dq is added to fp32 sums in memory.
//
// Scores are transposed, [keys, queries], so that what a warp makes of them is an operand of its
// next product where it is. Two kinds of warps share the five products; warp w of either kind has
// keys [32 w, 32 w + 32):
//   value warps  S = K q^T, P = exp2(S - lse) --P--> shared,     dv += P dout
//   key warps    dP = V dout^T, shared --P--> dS = P (dP - delta) --dS--> shared, dk += dS q
// and all of them, a query tile later, dq += dS^T K. While one kind makes exponentials, the other
// has products to do. A pair of warps meets at a barrier of its own over P; the block meets once
// for each query tile.
//
// `Pairs`: the mask or the bias has a query dimension. The value warps read them, the key warps write
// the gradient of the bias, a query tile later. `Ordered`: the blocks take turns at adding to dq.
template <class T, int D, bool Pairs, bool Ordered>
struct KeyMajorBackwardKernel {
  using Params = KeyMajorParams;
  static constexpr int warps = 8;
  static constexpr int threads = warps * 32;
  static constexpr int min_blocks = 1;
  static constexpr int keys = owned_keys;
  static constexpr int warp_keys = 32;

  using SumTile = QuerySumTile<D>;
  static constexpr int rows = SumTile::rows;
  using QueryRows = SharedTile<rows, D>;
  using KeyRows = SharedTile<keys, D>;
  using Scores = SharedTile<keys, rows>;
  using Order = std::conditional_t<Pairs, LaneContiguous<4>, InOrder>;

  struct SharedStorage {
    struct Stage {
      alignas(1024) std::byte q[QueryRows::bytes];
      alignas(1024) std::byte dout[QueryRows::bytes];
    };
    alignas(1024) std::byte k[KeyRows::bytes];
    alignas(1024) std::byte v[KeyRows::bytes];
    Stage stage[2];
    // P on its way from a value warp to a key warp, then dS, in the same bytes.
    alignas(1024) std::byte scores[2][Scores::bytes];
    alignas(16) float lse2[2][rows];
    alignas(16) float delta[2][rows];
    ColumnTile<keys> columns;
    typename Turn<Ordered>::Storage turn;
    std::conditional_t<Pairs, MaskedQueryTiles::Storage, NoStorage> walk;
  };

  static long blocks(const Params& p) { return KeyTile::count(p.shape, keys); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    Worker(p, shared).run();
  }

 private:
  // A lane's part of the score tile of a warp, [warp_keys, rows], and the same in 16 bits: an A
  // operand of a product over the queries.
  static constexpr int m16 = warp_keys / 16;
  static constexpr int n8 = rows / 8;
  using ScoreAccumulator = Accumulator<warp_keys, rows>;
  using ScoreOperand = std::uint32_t[m16][n8 / 2][4];

  // The scores of a tile are multiplied in two parts, queries [0, 32) and [32, 64), and no branch lies
  // between the product of the second and what is made of the first: the compiler mixes them. With
  // pairs there are not enough registers at D 128.
  static constexpr int parts = Pairs && D > 64 ? 1 : 2;
  static constexpr int blocks_ahead = Pairs ? 1 : 3;

  using Place = QueryPlace;

  struct Nothing {
    template <class... Arguments>
    __device__ explicit Nothing(const Arguments&...) {}
  };

  class Worker {
   public:
    __device__ Worker(const Params& params, SharedStorage& storage)
        : p(params),
          shared(storage),
          tile(p.shape, keys, Ordered, Turn<Ordered>::take(p.turns, storage.turn)),
          turn(p.turns, storage.turn, tile.before),
          lane(lane_id()),
          warp(warp_id()),
          pair(warp % (warps / 2)),
          is_value(warp < warps / 2),
          copies_whole_rows(p.q.aligned && p.dout.aligned && p.shape.head_dim == D),
          flags(*p.flags),
          pair_rows(p.score, p.shape, tile, tile.key + pair * warp_keys),
          pair_gradients(p, tile, pair) {
      clear(sum);
    }

    __device__ void run() {
      const int group = p.shape.heads_q / p.shape.heads_kv;
      // The heads of a group see the same columns, unless the mask or the bias tells them apart.
      const auto of_query_head = [](const Broadcast& b) { return !b.per_query && b.head_q != 0; };
      const bool apart = of_query_head(p.score.mask) || of_query_head(p.score.bias);
      const int heads = apart ? 1 : group;
      for (int member = 0; member < group; member += heads)
        walk(tile.kv_head * group + member, heads);
      turn.finish();
      store();
    }

   private:
    __device__ void walk(int first_head, int heads) {
      __syncthreads();  // all are done with the heads before
      const auto key = [&](int r) { return tile.key + Order::key(r); };
      const auto exists = [&](int r) { return key(r) < p.shape.seqlen_k; };
      using Group = ThreadGroup<threads>;
      const Group block = Group::of_block();
      const auto copy = [&](const InputRows& rows, std::byte* to) {
        const RowSource<KeyRows, Group> source(block, rows, tile.batch, tile.kv_head,
                                               p.shape.head_dim);
        copy_g2s(block, source, shared_address(to), exists, key);
      };
      copy(p.k, shared.k);
      copy(p.v, shared.v);
      if (threadIdx.x < keys) load_columns(first_head);
      __syncthreads();
      const QueryBounds bounds(shared.columns);
      if (!bounds.all_seen()) clear_unseen_keys();

      const int begin = bounds.touched_begin / rows * rows;
      const int end = bounds.touched_end;
      auto queries = walk_of(first_head, heads, begin, end);
      std::int64_t previous = 0;
      [[maybe_unused]] Place previous_place{};
      [[maybe_unused]] bool previous_is_last = false;  // of the heads' tiles of the same queries
      if (is_value && queries.has()) {
        load_pairs(queries.place());
        copy_queries(queries.place(), 0);
      }
      clear_passed(queries, first_head, heads, -1);
      for (int n = 0;; ++n) {
        const bool has_tile = queries.has();
        const Place place = queries.place();
        const int stage = n % 2;
        cp_async_wait_all();
        if (n > 0) turn.wait(static_cast<int>(previous));
        __syncthreads();
        if (n > 0) turn.begin(static_cast<int>(previous));
        if (!is_value && n > 0) {
          add_queries(previous, 1 - stage);
          add_pairs(previous_place, previous_is_last, 1 - stage);
        }
        if (has_tile) {
          if (p.saturate && (flags & dout_not_finite) != 0) {
            clear_non_finite<T, QueryRows, threads>(shared_address(shared.stage[stage].dout));
            __syncthreads();
          }
          const int number = queries.number();
          queries.advance();
          clear_passed(queries, first_head, heads, number);
          step(place, stage, bounds, queries.place(), queries.has());
        }
        if (is_value && n > 0) add_queries(previous, 1 - stage);
        if (!has_tile) break;
        previous = query_tile(place);
        previous_place = place;
        // The heads' tiles of the same queries are visited one after the other.
        previous_is_last = !queries.has() || queries.place().row != place.row;
      }
      if (!is_value && p.dbias.data != nullptr && !p.dbias.per_query) add_bias(first_head);
    }

    __device__ auto walk_of(int first_head, int heads, int begin, int end) {
      if constexpr (Pairs) {
        return MaskedQueryTiles(shared.walk, p.score.packed_mask, tile, p.shape.seqlen_q,
                                first_head, heads, begin, end, warp == warps / 2);
      } else {
        return EveryQueryTile(first_head, heads, begin, end, rows);
      }
    }

    __device__ void load_pairs(Place place) {
      if constexpr (Pairs) pair_rows.load(place);
    }

    // The gradient of a bias of pairs in the tiles that a walk passed after tile `number`.
    template <class Walk>
    __device__ void clear_passed(const Walk& queries, int first_head, int heads, int number) const {
      if constexpr (Pairs) {
        if (!is_value && pair_gradients.wanted())
          pair_gradients.clear(first_head, heads, number, queries.number());
      }
    }

    __device__ void load_columns(int head) {
      ColumnLoader<T> loader(p.score, p.shape, tile.batch, head, tile.kv_head);
      const int column = static_cast<int>(threadIdx.x);
      const int key = tile.key + Order::key(column);
      loader.load(key, key < p.shape.seqlen_k);
      loader.store(shared.columns, column, 0, p.shape.seqlen_q);
    }

    // What is not finite in a row of K would meet the zeros of dS.
    __device__ void clear_unseen_keys() {
      cp_async_wait_all();
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < keys * KeyRows::chunks; i += threads) {
        const int row = i / KeyRows::chunks;
        if (shared.columns.range[row].length == 0) {
          store_shared_16(shared_address(shared.k) + KeyRows::offset(row, i % KeyRows::chunks),
                          {0, 0, 0, 0});
        }
      }
    }

    // By the value warps, once they have handed P over: the key warps have more to do. Zeros past
    // the end; no key sees these rows.
    __device__ void copy_queries(Place place, int stage) {
      const int size = p.shape.seqlen_q - place.row;
      copy_query_rows<QueryRows, threads / 2>(p.q, tile.batch, p.shape.head_dim, copies_whole_rows,
                                              place, size, shared_address(shared.stage[stage].q));
      copy_query_rows<QueryRows, threads / 2>(p.dout, tile.batch, p.shape.head_dim,
                                              copies_whole_rows, place, size,
                                              shared_address(shared.stage[stage].dout));
      const int i = static_cast<int>(threadIdx.x) % rows;
      const std::int64_t from = row_index(place) + (i < size ? i : 0);
      if (threadIdx.x < rows) {
        cp_async_4(shared_address(&shared.lse2[stage][i]), p.lse2 + from, i < size);
      } else {
        cp_async_4(shared_address(&shared.delta[stage][i]), p.delta + from, i < size);
      }
    }

    // Of the tiles of p.dq_sum.
    __device__ std::int64_t query_tile(Place place) const {
      const int tiles = (p.shape.seqlen_q + rows - 1) / rows;
      return (static_cast<std::int64_t>(tile.batch) * p.shape.heads_q + place.head) * tiles +
             place.row / rows;
    }

    __device__ std::int64_t row_index(Place place) const {
      return (static_cast<std::int64_t>(tile.batch) * p.shape.heads_q + place.head) *
                 p.shape.seqlen_q +
             place.row;
    }

    // Both kinds of warps make the same two products, of different tiles.
    __device__ void step(Place place, int stage, const QueryBounds& bounds, Place next,
                         bool has_next) {
      const std::uint32_t q = shared_address(shared.stage[stage].q);
      const std::uint32_t dout = shared_address(shared.stage[stage].dout);
      ScoreAccumulator x;
      ScoreOperand operand;
      if constexpr (Pairs) {
        if (is_value) pair_rows.copy_bias(place, handover(stage));
      }
      multiply_part<0>(is_value ? q : dout, x);
      if (is_value) make_probabilities(place, stage, bounds, q, x, operand);
      barrier_wait(1 + pair, 64);  // P of this pair of warps is there
      if (!is_value) {
        multiply_part<1>(dout, x);
        make_gradients(stage, x, operand);
      } else if (has_next) {
        copy_queries(next, 1 - stage);
        load_pairs(next);
      }
      multiply<T, rows>(sum, operand, OperandB<QueryRows, Major::mn>(is_value ? dout : q, 0));
    }

    // The columns of part `Part` of K q^T or V dout^T; nothing if there is no such part.
    template <int Part>
    __device__ void multiply_part(std::uint32_t queries, ScoreAccumulator& x) const {
      constexpr int columns = n8 / parts;
      if constexpr (Part < parts) {
        clear_columns<Part * columns, (Part + 1) * columns>(x);
        multiply_columns<T, D, Part * columns, (Part + 1) * columns, blocks_ahead>(
            x,
            OperandA<KeyRows, Major::k>(shared_address(is_value ? shared.k : shared.v),
                                        pair * warp_keys),
            OperandB<QueryRows, Major::k>(queries, Part * rows / parts));
      }
    }

    // P of scores, of which the last part is still to be made, for this warp's product and for its
    // key warp. Each path has a product of its own: no branch may follow it.
    __device__ void make_probabilities(Place place, int stage, const QueryBounds& bounds,
                                       std::uint32_t q, ScoreAccumulator& s,
                                       ScoreOperand& weights) {
      const bool biased = p.score.bias.data != nullptr && !(Pairs && p.score.bias.per_query);
      const bool masked = place.row < bounds.full_begin || place.row + rows > bounds.full_end;
      const bool careful = (flags & lse_has_low) != 0;
      const auto add_bias = [&] {
        add_key_bias(p.score.factor, shared.columns, pair * warp_keys, lane, s);
      };
      if (Pairs || masked || careful || p.score.form == ScoreForm::scaled) {
        multiply_part<1>(q, s);
        if (p.score.form == ScoreForm::scaled)
          for_each_element(s, [&](float& x, int, int, int) { x *= p.score.inner; });
        if (biased) add_bias();
        if constexpr (Pairs) pair_rows.apply(place, handover(stage), s);
        if (masked) mask_keys(shared.columns, pair * warp_keys, lane, place.row, s);
        if (careful) {
          make_careful_probabilities<T, Pairs>(
              p, {tile.batch, place.head, tile.kv_head}, place.row, flags,
              shared.lse2[stage] + 2 * (lane % 4),
              [&](int m, int h) { return tile.key + Order::key(key_of(m, h)); }, s);
        }
        weigh(stage, careful, s, weights);
      } else if (biased) {
        multiply_part<1>(q, s);
        add_bias();
        weigh(stage, false, s, weights);
      } else {
        multiply_part<1>(q, s);
        weigh(stage, false, s, weights);
      }
    }

    __device__ void weigh(int stage, bool careful, ScoreAccumulator& s,
                          ScoreOperand& weights) const {
      hand_probabilities<T>(handover(stage) + lane_words(), p.score.exponent,
                            shared.lse2[stage] + 2 * (lane % 4), careful, s, weights);
    }

    // dS of dP, for this warp's product and for dq.
    __device__ void make_gradients(int stage, const ScoreAccumulator& dp_tile,
                                   ScoreOperand& operand) {
      take_gradients<T>(handover(stage) + lane_words(), shared.delta[stage] + 2 * (lane % 4),
                        p.saturate, dp_tile, operand);
      if (p.dbias.data != nullptr && !(Pairs && p.dbias.per_query))
        add_query_sums<T>(operand, bias_sum);
      __syncwarp();  // all lanes have read P
#pragma unroll
      for (int m = 0; m < m16; ++m) {
#pragma unroll
        for (int k = 0; k < n8 / 2; ++k) {
          store_block<Scores>(
              shared_address(shared.scores[stage]),
              [&](int r) { return pair * warp_keys + 16 * m + r; }, 16 * k, operand[m][k]);
        }
      }
    }

    // The gradient of a bias of pairs, of a tile whose dS is complete.
    __device__ void add_pairs(Place place, bool last_head, int stage) {
      if constexpr (Pairs) {
        if (pair_gradients.wanted())
          pair_gradients.add(place, shared_address(shared.scores[stage]), last_head);
      }
    }

    // dq of a query tile whose dS is complete.
    __device__ void add_queries(std::int64_t query_tile, int stage) {
      if (p.dq_sum == nullptr) return;
      Accumulator<SumTile::warp_rows, SumTile::warp_columns> dq;
      clear(dq);
      const int column = warp / SumTile::row_warps * SumTile::warp_columns;
      multiply<T, keys, blocks_ahead>(
          dq,
          OperandA<Scores, Major::mn>(shared_address(shared.scores[stage]),
                                      warp % SumTile::row_warps * SumTile::warp_rows),
          OperandB<KeyRows, Major::mn>(shared_address(shared.k), column));
      float* const to = p.dq_sum + query_tile * SumTile::floats + SumTile::offset(warp, 0, 0, lane);
      const auto add = [&](const auto& exists) {
#pragma unroll
        for (int m = 0; m < SumTile::row_blocks; ++m) {
#pragma unroll
          for (int n = 0; n < SumTile::column_blocks; ++n) {
            if (!exists(column + 8 * n)) continue;
            reduce_add(to + SumTile::offset(0, m, n, 0), dq[m][n][0], dq[m][n][1], dq[m][n][2],
                       dq[m][n][3]);
          }
        }
      };
      // Without a branch for each block: 4 % less time at D 64, 3 % more at D 128.
      const bool whole_rows = p.shape.head_dim == D;
      if (D == 64 && whole_rows)
        add([](int) { return true; });
      else
        add([&](int first) { return whole_rows || first < p.shape.head_dim; });
    }

    // Where P passes from a value warp to its key warp. Until then the biases of pairs lie there.
    __device__ std::uint32_t handover(int stage) const {
      static_assert(warp_keys * Scores::row_bytes == WarpBiasTile::bytes);
      return shared_address(shared.scores[stage]) +
             static_cast<std::uint32_t>(pair * warp_keys * Scores::row_bytes);
    }
    // A lane's words in it.
    __device__ std::uint32_t lane_words() const { return static_cast<std::uint32_t>(lane * 16); }

    // The row of scores, and of shared columns, of accumulator rows (m, h) of the lane.
    __device__ int key_of(int m, int h) const {
      return pair * warp_keys + 16 * m + 8 * h + lane / 4;
    }

    __device__ void add_bias(int head) {
      float* const sums = reinterpret_cast<float*>(p.dbias.data) + tile.batch * p.dbias.batch +
                          head * p.dbias.head_q + tile.kv_head * p.dbias.head_kv;
#pragma unroll
      for (int m = 0; m < m16; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int key = tile.key + Order::key(key_of(m, h));
          if (lane % 4 == 0 && key < p.shape.seqlen_k && bias_sum[m][h] != 0) {
            atomicAdd(sums + key * p.dbias.key, bias_sum[m][h]);
          }
          bias_sum[m][h] = 0;
        }
      }
    }

    // dv, over the rows of V, or dk, over those of K.
    __device__ void store() {
      const OutputRows& to = is_value ? p.dv : p.dk;
      __syncthreads();  // all have read K and V
      if (to.data == nullptr) return;
      const std::uint32_t staged = shared_address(is_value ? shared.v : shared.k);
      const float scale = is_value ? 1.0f : p.score.scale;
      const int begin = pair * warp_keys;
      copy_r2s<KeyRows, Order>(sum, staged, begin, 0, [&](float x, float y, int, int) {
        return pack_gradient<T>(x * scale, y * scale, p.saturate);
      });
      __syncwarp();
      copy_s2g<KeyRows>(ThreadGroup<warp_size>::of_warp(), staged, begin,
                        min(begin + warp_keys, p.shape.seqlen_k - tile.key), tile.key, to,
                        tile.batch, tile.kv_head, p.shape.head_dim);
    }

    const Params& p;
    SharedStorage& shared;
    const KeyTile tile;
    const Turn<Ordered> turn;  // at adding to dq
    const int lane;
    const int warp;
    const int pair;
    const bool is_value;
    const bool copies_whole_rows;
    const std::uint32_t flags;
    Accumulator<warp_keys, D> sum;  // dv or dk
    float bias_sum[m16][2] = {};    // of the lane's keys
    std::conditional_t<Pairs, PairRows<T>, Nothing> pair_rows;
    std::conditional_t<Pairs, PairGradients<T, D>, Nothing> pair_gradients;
  };
};

}  // namespace flash_dmattn::cuda::sm80
