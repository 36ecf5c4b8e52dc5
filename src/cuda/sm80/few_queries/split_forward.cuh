#pragma once

#include <type_traits>

#include "cuda/attention/softmax.cuh"
#include "cuda/primitives/tile_copy.cuh"
#include "cuda/sm80/few_queries/elements.cuh"
#include "cuda/sm80/few_queries/pipeline.cuh"
#include "cuda/sm80/few_queries/sums.cuh"
#include "cuda/sm80/forward/epilogue.cuh"

namespace flash_dmattn::cuda::sm80::few_queries {

// The keys of k and v. The members that only SlotKeys (slots.cuh) needs are empty here. With `Elementwise`, masks,
// biases differ between rows.
template <class T, bool Elementwise>
struct TensorKeys {
  using Params = few_queries::Params;
  struct Info : KeyInfoLoader<T> {
    using KeyInfoLoader<T>::KeyInfoLoader;
    __device__ void load_token() const {}
    __device__ void prepare() const {}
  };
  using Elements = std::conditional_t<Elementwise, RowElements<T>, NoElements>;
  struct Storage {};
  static constexpr bool has_idle_blocks = false;
  template <class Pipeline>
  struct Extra {
    __device__ Extra(const Params&, const GroupRows&) {}
    __device__ void load() const {}
  };

  static long blocks(const Params& p) {
    return static_cast<long>(p.shape.batch) * p.shape.heads_kv * p.split.row_tiles * p.split.splits;
  }
  static __device__ BlockPart part(const Params& p, int block) { return {p, block}; }
  // The row of k and v for that of the call; negative: none, so that queries see no key.
  static __device__ int key_row(const Params&, int batch) { return batch; }
  static __device__ Info info(const Params& p, const GroupRows& rows, int) {
    return {p.score, p.shape, rows.batch, rows.first_head(), rows.kv_head};
  }
  static __device__ TileKeys tile_keys(const Params& p, const GroupRows& rows) {
    return {p, rows.queries(), rows.end_query()};
  }
  // The number of keys.
  static __device__ int count(const Params& p, const Info&) { return p.shape.seqlen_k; }
  // Whether one of them is present.
  static __device__ AllKeys present(const Info&) { return {}; }

  // Called after tile n is loaded and before its products.
  template <class Pipeline>
  static __device__ void complete(const Params&, const GroupRows&, const Pipeline&, int,
                                  const Storage&, const Extra<Pipeline>&) {}
  // Called after all tiles. It stores the block's results about its keys, for all blocks of a cluster or to memory.
  static __device__ void finish(const Info&, Storage&) {}
  static __device__ void store_cluster(const Params&, const GroupRows&, const Info&, const Storage&,
                                       const BlockPart&) {}
  static __device__ void store_split(const Params&, const GroupRows&, const Info&, const Storage&,
                                     int) {}
};

// A block computes a tile of rows over its part of the keys. If all parts are in a cluster, its blocks add them,
// otherwise CombineKernel does. A warp computes 16 rows over its part of each tile of keys, so that neither softmax nor
// products need other warps. The results of warps that share rows are added at the end.
template <class T, int D, Policy P, class Keys>
struct SplitForwardKernel {
  using Params = typename Keys::Params;
  static constexpr int threads = P.warps() * warp_size;
  static constexpr int min_blocks = P.min_blocks;
  static constexpr bool waits_itself = true;

  using Group = ThreadGroup<threads>;
  using QueryRows = SharedTile<P.rows(), D>;
  using Info = typename Keys::Info;
  using Pipeline = SplitPipeline<D, P, Info>;
  using KeyRows = typename Pipeline::RowTile;

  // The sums of each warp, which use the memory of K and V.
  struct WarpSums {
    static constexpr int columns = D + 8;  // rows begin 8 banks apart
    alignas(16) float out[P.key_warps][P.rows()][columns];
    RowSums sums[P.key_warps][P.rows()];
    RowSums total[P.rows()];  // the block's sums, whose output is in out[0]
  };
  struct SharedStorage {
    alignas(1024) std::byte q[QueryRows::bytes];
    union {
      typename Pipeline::Storage kv;
      WarpSums warp_sums;
    };
    typename Keys::Storage keys;
  };

  static long blocks(const Params& p) { return Keys::blocks(p); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const BlockPart part = Keys::part(p, static_cast<int>(blockIdx.x));
    if constexpr (Keys::has_idle_blocks) {
      // A barrier of the cluster does not wait for threads that have ended.
      if (part.split >= part.splits) return;
    }
    const int split = part.split;
    const int first_row = part.row_tile * P.rows();
    const int group_size = p.shape.group_heads();
    const GroupRows rows{part.batch, part.kv_head, group_size, first_row,
                         min(p.shape.seqlen_q * group_size - first_row, P.rows())};
    const int row_warp = warp_id() % P.row_warps;
    const int key_warp = warp_id() / P.row_warps;
    const std::uint32_t q_tile = shared_address(shared.q);
    const Group block = Group::of_block();

    const RowSource<QueryRows, Group> queries(block, p.q, rows.batch, rows.first_head(),
                                              p.shape.head_dim);
    const int key_row = Keys::key_row(p, rows.batch);
    if (key_row < 0) {
      if (p.split.in_cluster && split == 0) store_nothing(p, rows);
      return;
    }
    const Info info = Keys::info(p, rows, key_row);
    const typename Pipeline::Loader loader(block, shared.kv.loader, p, key_row, rows.kv_head);

    loader.init(block);
    typename Keys::template Extra<Pipeline> extra(p, rows);

    // The addresses of rows were computed while the previous kernel was ending.
    wait_for_previous_kernel();
    extra.load();
    Pipeline kv(
        shared.kv,
        typename Pipeline::Tiles(Keys::tile_keys(p, rows), info.has_values(), split, part.splits),
        loader, info, rows);
    // The queries are few, so the copies of K and V do not wait for the addresses of queries.
    kv.start([&] {
      copy_g2s(
          block, queries, q_tile, [&](int r) { return r < rows.count; },
          [&](int r) { return rows.query(r); }, [&](int r) { return rows.member(r); });
    });

    Accumulator<16, D> out;
    clear(out);
    OnlineSoftmax<T, 1> softmax;
    const bool biased = p.score.bias.data != nullptr && !p.score.bias.dense;
    const float factor = p.score.final_log2_scale;
    const int warp_key = key_warp * P.warp_keys();
    const OperandA<QueryRows, Major::k> q(q_tile, row_warp * 16);
    const LaneRows lane_rows(rows, row_warp * 16);
    const LanePosition position = LanePosition::of(0, warp_key);
    const typename Keys::Elements elements(p, rows, row_warp * 16);

    for (int n = 0; kv.has(n); ++n) {
      kv.acquire(n);
      Keys::complete(p, rows, kv, n, shared.keys, extra);
      const auto& key_info = kv.key_info(n);
      const std::uint32_t state = kv.state(n);
      if ((state & key_info.touched) != 0) {
        Accumulator<16, P.warp_keys()> scores;
        clear(scores);
        multiply<T, D>(scores, q, OperandB<KeyRows, Major::k>(kv.k_tile(n), warp_key));
        if (!p.saturate) softmax.mark_nonfinite(scores);
        shape_scores(p.score, scores);
        const bool partial = (state & key_info.partial) != 0;
        elements.apply(key_info, partial, kv.positions(n), lane_rows, position.column, scores);
        if (partial) {
          mask_columns(
              key_info, position.column, [&](int, int h) { return lane_rows.query[h]; }, scores);
        }
        if (biased) add_key_biases(p, kv, n, state, lane_rows, position, softmax, scores);
        softmax.update(scores, factor, out);
        const std::uint32_t values = kv.v_tile(n) + warp_key * KeyRows::row_bytes;
        add_values<T>(scores, OperandB<KeyRows, Major::mn>(values, 0), out);
      }
      kv.release(n);
    }
    cp_async_wait_all();
    allow_next_kernel();
    softmax.add_lanes();
    Keys::finish(kv.info(), shared.keys);
    __syncthreads();
    store_warp(shared.warp_sums, row_warp * 16, key_warp, factor, softmax, out);
    __syncthreads();
    if (p.split.in_cluster) {
      add_cluster(p, rows, Keys::count(p, kv.info()), Keys::present(kv.info()), part,
                  shared.warp_sums,
                  [&] { Keys::store_cluster(p, rows, kv.info(), shared.keys, part); });
    } else {
      store_block(p, rows, split, shared.warp_sums);
      Keys::store_split(p, rows, kv.info(), shared.keys, split);
    }
  }

 private:
  // Adds biases, less the rows' references, to scores whose hidden elements are -inf.
  static __device__ void add_key_biases(const Params& p, const Pipeline& kv, int n,
                                        std::uint32_t state, const LaneRows& rows,
                                        LanePosition position, OnlineSoftmax<T, 1>& softmax,
                                        Accumulator<16, P.warp_keys()>& scores) {
    const auto& key_info = kv.key_info(n);
    const float* const biases = &key_info.bias[position.column];
    if ((state & key_info.far) != 0 || softmax.has_references)
      softmax.raise_references(scores, biases);
    if (p.score.bias_delay == 0) {
      return softmax.has_references
                 ? add_column_bias(p.score.factor, biases, softmax.reference, scores)
                 : add_column_bias(p.score.factor, biases, scores);
    }
    const auto keys = kv.positions(n);
    add_delayed_column_bias(
        p.score.factor, key_info, [&](int m, int h) { return softmax.reference[m][h]; },
        position.column,
        [&](int column) { return delayed_bias_begin(p.score, p.shape, keys[column]); },
        [&](int, int h) { return rows.query[h]; }, scores);
  }

  // Stores the results of rows that see no key.
  static __device__ void store_nothing(const Params& p, const GroupRows& rows) {
    for (int row = warp_id(); row < rows.count; row += P.warps())
      store_row<T, D>(p, rows.head(row), rows.query(row), 0, AllKeys(), RowTotal<D>());
  }

  static __device__ void store_warp(WarpSums& warps, int warp_row, int key_warp, float factor,
                                    const OnlineSoftmax<T, 1>& softmax,
                                    const Accumulator<16, D>& out) {
    const LanePosition position = LanePosition::of(warp_row, 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = position.row + 8 * h;
      float* const to = &warps.out[key_warp][row][position.column];
#pragma unroll
      for (int d = 0; d < D / 8; ++d) {
        *reinterpret_cast<float2*>(to + 8 * d) = {out[0][d][2 * h], out[0][d][2 * h + 1]};
      }
      if (position.column == 0) {
        warps.sums[key_warp][row] = {softmax.max[0][h] * factor, softmax.sum[0][h],
                                     softmax.reference[0][h]};
      }
    }
  }

  // Adds the results of warps that share rows, and calls store(row, column, sums, four columns).
  template <class Store>
  static __device__ void add_warps(const GroupRows& rows, const WarpSums& warps,
                                   const Store& store) {
    constexpr int row_chunks = D / 4;
    for (int i = static_cast<int>(threadIdx.x); i < rows.count * row_chunks; i += threads) {
      const int row = i / row_chunks;
      const int column = i % row_chunks * 4;
      RowSums total = no_sums();
#pragma unroll
      for (int w = 0; w < P.key_warps; ++w) raise_max(total, warps.sums[w][row]);
      float4 out = {0, 0, 0, 0};
#pragma unroll
      for (int w = 0; w < P.key_warps; ++w) {
        const RowSums sums = warps.sums[w][row];
        if (sees_nothing(sums)) continue;
        const float scale = rescale(sums, total);
        const float4 part = *reinterpret_cast<const float4*>(&warps.out[w][row][column]);
        total.sum = fmaf(sums.sum, scale, total.sum);
        out = {fmaf(part.x, scale, out.x), fmaf(part.y, scale, out.y), fmaf(part.z, scale, out.z),
               fmaf(part.w, scale, out.w)};
      }
      store(row, column, total, out);
    }
  }

  static __device__ void store_block(const Params& p, const GroupRows& rows, int split,
                                     const WarpSums& warps) {
    add_warps(rows, warps, [&](int row, int column, RowSums sums, float4 out) {
      const std::int64_t part =
          rows.head(row).row_index(p.shape, rows.query(row)) * p.split.splits + split;
      *reinterpret_cast<float4*>(p.outs + part * D + column) = out;
      if (column == 0) p.sums[part] = sums;
    });
  }

  // Divides the rows of a cluster among its warps, which read the sums of all its blocks.
  template <class Present, class Also>
  static __device__ void add_cluster(const Params& p, const GroupRows& rows, int keys,
                                     const Present& present, const BlockPart& part, WarpSums& warps,
                                     const Also& also) {
    add_warps(rows, warps, [&](int row, int column, RowSums sums, float4 out) {
      *reinterpret_cast<float4*>(&warps.out[0][row][column]) = out;
      if (column == 0) warps.total[row] = sums;
    });
    cluster_sync();
    const int blocks = part.splits;
    // Loads from another block's shared memory are bound by latency. Many are kept in flight at once, with 64 registers
    // of columns.
    constexpr int together = D <= 128 ? 16 : 8;
    for (int row = warp_id() * blocks + part.split; row < rows.count; row += P.warps() * blocks) {
      RowTotal<D> total;
      total.template add_parts<together>(
          0, 1, blocks, [&](int n) { return in_cluster_block(&warps.total[row], n); },
          [&](int n) { return in_cluster_block(&warps.out[0][row][0], n); });
      store_row<T, D>(p, rows.head(row), rows.query(row), keys, present, total);
    }
    also();
    cluster_leave();
  }
};

}  // namespace flash_dmattn::cuda::sm80::few_queries
