#pragma once

#include <type_traits>

#include "cuda/common/softmax.cuh"
#include "cuda/common/tile_copy.cuh"
#include "cuda/sm80/few_queries/elements.cuh"
#include "cuda/sm80/few_queries/pipeline.cuh"
#include "cuda/sm80/forward_epilogue.cuh"

namespace flash_dmattn::cuda::sm80::few_queries {

// A block computes a tile of rows over its part of the keys and leaves sums, which CombineKernel adds up.
// A warp has 16 rows and its part of each tile of keys, so that neither softmax nor products leave it; the warps that
// share rows are added at the end. `Elementwise`: masks, biases or ranks differ between rows.
template <class T, int D, Policy P, bool Elementwise>
struct SplitForwardKernel {
  using Params = few_queries::Params;
  static constexpr int threads = P.warps() * warp_size;
  static constexpr int min_blocks = P.min_blocks;

  using Group = ThreadGroup<threads>;
  using QueryRows = SharedTile<P.rows(), D>;
  using Pipeline = SplitPipeline<T, D, P>;
  using KeyRows = typename Pipeline::RowTile;
  using Elements = std::conditional_t<Elementwise, RowElements<T>, NoElements>;

  // What the warps leave, where K and V were.
  struct WarpSums {
    static constexpr int columns = D + 8;  // rows begin 8 banks apart
    alignas(16) float out[P.key_warps][P.rows()][columns];
    RowSums sums[P.key_warps][P.rows()];
  };
  struct SharedStorage {
    alignas(1024) std::byte q[QueryRows::bytes];
    union {
      typename Pipeline::Storage kv;
      WarpSums warp_sums;
    };
  };

  static long blocks(const Params& p) {
    return static_cast<long>(p.shape.batch) * p.shape.heads_kv * p.split.row_tiles * p.split.splits;
  }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    // The row tiles of a part of the keys are neighbours: its keys reach them through the L2.
    int work = static_cast<int>(blockIdx.x);
    const int row_tile = work % p.split.row_tiles;
    work /= p.split.row_tiles;
    const int split = work % p.split.splits;
    work /= p.split.splits;
    const int group_size = p.shape.heads_q / p.shape.heads_kv;
    const int first_row = row_tile * P.rows();
    const GroupRows rows{work / p.shape.heads_kv, work % p.shape.heads_kv, group_size, first_row,
                         min(p.shape.seqlen_q * group_size - first_row, P.rows())};
    const int row_warp = warp_id() % P.row_warps;
    const int key_warp = warp_id() / P.row_warps;
    const std::uint32_t q_tile = shared_address(shared.q);
    const Group block = Group::of_block();

    copy_g2s(
        block,
        RowSource<QueryRows, Group>(block, p.q, rows.batch, rows.first_head(), p.shape.head_dim),
        q_tile, [&](int r) { return r < rows.count; }, [&](int r) { return rows.query(r); },
        [&](int r) { return rows.member(r); });
    const KeyInfoLoader<T> key_info_loader(p.score, p.shape, rows.batch, rows.first_head(),
                                           rows.kv_head);
    const TileKeys keys(p, rows.queries(), rows.end_query());
    Pipeline kv(shared.kv,
                typename Pipeline::Tiles(keys, key_info_loader.has_values(), split, p.split.splits),
                typename Pipeline::Loader(block, shared.kv.loader, p, rows.batch, rows.kv_head),
                key_info_loader, rows);
    kv.start();

    Accumulator<16, D> out;
    clear(out);
    OnlineSoftmax<T, 1> softmax;
    const bool biased = p.score.bias.data != nullptr && !(Elementwise && p.score.bias.dense);
    const float factor = p.score.final_log2_scale;
    const int warp_key = key_warp * P.warp_keys();
    const OperandA<QueryRows, Major::k> q(q_tile, row_warp * 16);
    const LaneRows lane_rows(rows, row_warp * 16);
    const LanePosition position = LanePosition::of(0, warp_key);
    const Elements elements(p.score, rows, row_warp * 16);

    for (int n = 0; n < kv.count(); ++n) {
      kv.acquire(n);
      const auto& key_info = kv.key_info(n);
      const std::uint32_t state = kv.state(n);
      if ((state & key_info.touched) != 0) {
        Accumulator<16, P.warp_keys()> scores;
        clear(scores);
        multiply<T, D>(scores, q, OperandB<KeyRows, Major::k>(kv.k_tile(n), warp_key));
        if (!p.saturate) softmax.mark_nonfinite(scores);
        shape_scores(p.score, scores);
        if (biased) add_column_bias(p.score.factor, key_info, position, scores);
        const bool partial = (state & key_info.partial) != 0;
        elements.apply(key_info, partial, kv.positions(n), lane_rows, position.column, scores);
        if (partial) mask_keys(key_info, lane_rows, position.column, scores);
        softmax.update(scores, factor, out);
        const std::uint32_t values = kv.v_tile(n) + warp_key * KeyRows::row_bytes;
        add_values<T>(scores, OperandB<KeyRows, Major::mn>(values, 0), out);
      }
      kv.release(n);
    }
    cp_async_wait_all();
    allow_next_kernel();
    softmax.add_lanes();
    __syncthreads();
    store_warp(shared.warp_sums, row_warp * 16, key_warp, factor, softmax, out);
    __syncthreads();
    store_block(p, rows, split, shared.warp_sums);
  }

 private:
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
        warps.sums[key_warp][row] = {softmax.max[0][h] * factor, softmax.sum[0][h]};
      }
    }
  }

  // Adds the warps that share rows.
  static __device__ void store_block(const Params& p, const GroupRows& rows, int split,
                                     const WarpSums& warps) {
    constexpr int row_chunks = D / 4;
    for (int i = static_cast<int>(threadIdx.x); i < rows.count * row_chunks; i += threads) {
      const int row = i / row_chunks;
      const int column = i % row_chunks * 4;
      RowSums total{negative_infinity, 0};
#pragma unroll
      for (int w = 0; w < P.key_warps; ++w) total.max = fmaxf(total.max, warps.sums[w][row].max);
      float4 out = {0, 0, 0, 0};
#pragma unroll
      for (int w = 0; w < P.key_warps; ++w) {
        const RowSums sums = warps.sums[w][row];
        if (sees_nothing(sums)) continue;
        const float scale = rescale(sums.max, total.max);
        const float4 part = *reinterpret_cast<const float4*>(&warps.out[w][row][column]);
        total.sum = fmaf(sums.sum, scale, total.sum);
        out = {fmaf(part.x, scale, out.x), fmaf(part.y, scale, out.y), fmaf(part.z, scale, out.z),
               fmaf(part.w, scale, out.w)};
      }
      const std::int64_t part =
          rows.head(row).row_index(p.shape, rows.query(row)) * p.split.splits + split;
      *reinterpret_cast<float4*>(p.outs + part * D + column) = out;
      if (column == 0) p.sums[part] = total;
    }
  }
};

}  // namespace flash_dmattn::cuda::sm80::few_queries
