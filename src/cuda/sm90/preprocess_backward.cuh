#pragma once

#include <algorithm>

#include "cuda/common/math.cuh"
#include "cuda/common/preprocess.cuh"
#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/prepare_key_info.cuh"

namespace flash_dmattn::cuda::sm90 {

// All that the main loop needs before it, in one launch: the preprocess that the families share, RowStats, zeros for
// the sums of dq, and key info. DRAM writes the zeros while it reads out and dout, and the latencies of the small
// arrays are hidden under both. A block has 64 rows of a head, which is padded to whole query tiles, and a share of the
// key info; of that there may be more: further blocks have nothing else.
template <class T>
struct PreprocessKernel {
  using Rows = BwdPreprocessKernel<T>;
  struct Params {
    BackwardParams
        common;  // of the call; the main loop's q may be a copy without elements that are not finite
    PrepareKeyInfo<T> key_info;
    long key_items = 0;  // of it
    float factor = 0;    // log2 e times the scale
    float* row_stats = nullptr;
    float* dq_accum = nullptr;  // null: no dq
    int tile_rows = 0;
    int accum_columns = 0;

    __host__ __device__ int tiles() const { return ceil_div(common.shape.seqlen_q, tile_rows); }
    __host__ __device__ long row_blocks() const {
      return long{common.shape.batch} * common.shape.heads_q * tiles() *
             (tile_rows / Rows::block_rows);
    }
  };
  struct SharedStorage {};
  static constexpr int threads = Rows::threads;
  static constexpr int min_blocks = Rows::min_blocks;

  static long blocks(const Params& p) {
    return std::max(p.row_blocks(), ceil_div(p.key_items, threads));
  }

  __device__ void operator()(const Params& p, SharedStorage&) const {
    const long block = blockIdx.x;
    const int thread = static_cast<int>(threadIdx.x);
    const bool has_rows = block < p.row_blocks();
    const int head_blocks = p.tiles() * (p.tile_rows / Rows::block_rows);
    const auto head = static_cast<int>(block / head_blocks);
    const int first_row = static_cast<int>(block % head_blocks) * Rows::block_rows;
    if (has_rows) {
      if (p.dq_accum != nullptr) clear_dq(p, block);
      Rows::compute(p.common, head, first_row);
    }
    // Evenly, so that no block takes longer than its neighbours.
    const long share = ceil_div(p.key_items, gridDim.x);
    if (thread < share) p.key_info(block * share + thread);
    if (!has_rows) return;
    __syncthreads();  // delta and lse_log2 of the block's rows are written
    if (thread < Rows::block_rows) store_stats(p, head, first_row + thread);
  }

 private:
  static __device__ void clear_dq(const Params& p, long block) {
    const int floats = Rows::block_rows * p.accum_columns;
    auto* const to = reinterpret_cast<float4*>(p.dq_accum + block * floats);
    for (int i = static_cast<int>(threadIdx.x); i < floats / 4; i += threads)
      to[i] = make_float4(0, 0, 0, 0);
  }

  // Of one row; RowStats has the scores of a tile's rows, then their delta.
  static __device__ void store_stats(const Params& p, int head, int query) {
    const int seqlen_q = p.common.shape.seqlen_q;
    const bool exists = query < seqlen_q;
    const long from = long{head} * seqlen_q + query;
    const long tile = long{head} * p.tiles() + query / p.tile_rows;
    float* const to = p.row_stats + tile * 2 * p.tile_rows + query % p.tile_rows;
    to[0] = exists ? -p.common.lse_log2[from] / p.factor : negative_infinity;
    to[p.tile_rows] = exists ? p.common.delta[from] : 0;
  }
};

}  // namespace flash_dmattn::cuda::sm90
