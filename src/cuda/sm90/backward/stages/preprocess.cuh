#pragma once

#include <algorithm>

#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/prepare_key_info.cuh"
#include "cuda/stages/packed_mask.cuh"
#include "cuda/stages/preprocess.cuh"

namespace flash_dmattn::cuda::sm90 {

// Prepares everything that the main loop needs in one launch: the preprocess that the families share, RowStats, zeros
// for the sums of dq, and key info. DRAM writes the zeros while it reads out and dout, and both hide the latencies of
// the small arrays. A block has 64 rows of a head, which is padded to whole query tiles.
template <class T>
struct PreprocessKernel {
  using Rows = BwdPreprocessKernel<T>;
  struct Params {
    // The parameters of the call, with the caller's q, as the main loop's q may be a copy without inf and NaN.
    BackwardParams common;
    PrepareKeyInfo<T> key_info;
    // The number of blocks that compute key info. If they outnumber the blocks of rows, the last blocks compute only
    // that.
    long key_blocks = 0;
    float factor = 0;        // scale log2 e
    bool has_dense = false;  // a dense mask or bias
    float* row_stats = nullptr;
    float* dq_accum = nullptr;  // null without dq
    int tile_rows = 0;
    int accum_columns = 0;

    __host__ __device__ int tiles() const { return ceil_div(common.shape.seqlen_q, tile_rows); }
    __host__ __device__ int head_blocks() const { return tiles() * (tile_rows / Rows::block_rows); }
    __host__ __device__ long row_blocks() const {
      return long{common.shape.batch} * common.shape.heads_q * head_blocks();
    }
  };
  struct SharedStorage {};
  static constexpr int threads = Rows::threads;
  static constexpr int min_blocks = Rows::min_blocks;

  static long blocks(const Params& p) { return std::max(p.row_blocks(), p.key_blocks); }

  __device__ void operator()(const Params& p, SharedStorage&) const {
    compute(p, blockIdx.x, gridDim.x);
  }

  // Does the work of block `block` of `blocks`, with all threads of a block.
  static __device__ void compute(const Params& p, long block, long blocks) {
    if (block < p.row_blocks()) {
      if (p.dq_accum != nullptr) clear_dq(p, block);
      const auto head = static_cast<int>(block / p.head_blocks());
      const auto first_row = static_cast<int>(block % p.head_blocks()) * Rows::block_rows;
      const typename Rows::Row mine = Rows::compute(p.common, head, first_row);
      if (mine.row >= 0) store_stats(p, head, mine);
    }
    if (p.key_blocks == 0) return;
    // Key info is spread over the grid, so that few concurrent blocks wait for its loads.
    const long stride = blocks / p.key_blocks;
    if (block % stride == 0) p.key_info(block / stride * threads + threadIdx.x);
  }

 private:
  static __device__ void clear_dq(const Params& p, long block) {
    const int floats = Rows::block_rows * p.accum_columns;
    auto* const to = reinterpret_cast<float4*>(p.dq_accum + block * floats);
    for (int i = static_cast<int>(threadIdx.x); i < floats / 4; i += threads)
      to[i] = make_float4(0, 0, 0, 0);
  }

  // Stores RowStats.
  static __device__ void store_stats(const Params& p, int head, const typename Rows::Row& mine) {
    const long tile = long{head} * p.tiles() + mine.row / p.tile_rows;
    float* const to = p.row_stats + tile * p.tile_rows * row_stats_bytes / sizeof(float);
    const int row = mine.row % p.tile_rows;
    const float high = mine.lse_log2.x;
    const float low = mine.lse_log2.y;
    const bool splits = Rows::is_large_lse(high) && !p.has_dense;
    to[row] = splits ? 0 : -high / p.factor;
    to[p.tile_rows + row] = mine.delta;
    to[2 * p.tile_rows + row] = splits ? -high : 0;
    const float rest = splits ? -low : p.has_dense ? rest_of(high, low, p.factor) : 0;
    reinterpret_cast<__half*>(to + 3 * p.tile_rows)[row] = __float2half_rn(rest);
  }

  // The remainder of rounding -(high + low) / factor.
  static __device__ float rest_of(float high, float low, float factor) {
    const float quotient = -high / factor;
    const float rest = (fmaf(-quotient, factor, -high) - low) / factor;
    return isfinite(rest) ? rest : 0;
  }
};

// The preprocessing of a call with a dense mask, which the first blocks pack. The other blocks start where blocks of the mask have ended,
// and keep DRAM busy while the last of these load.
template <class T>
struct PackAndPreprocessKernel {
  using Pack = PackMaskKernel;
  using Preprocess = PreprocessKernel<T>;
  struct Params {
    PackMaskParams mask;
    typename Preprocess::Params preprocess;
    long mask_blocks = Pack::blocks(mask);
  };
  using SharedStorage = typename Pack::SharedStorage;
  static constexpr int threads = Pack::threads;
  static constexpr int min_blocks = Pack::min_blocks;
  static_assert(threads == Preprocess::threads && min_blocks == Preprocess::min_blocks);

  static long blocks(const Params& p) { return p.mask_blocks + Preprocess::blocks(p.preprocess); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const long block = blockIdx.x;
    if (block < p.mask_blocks) {
      Pack::pack(p.mask, static_cast<int>(block), shared);
    } else {
      Preprocess::compute(p.preprocess, block - p.mask_blocks, gridDim.x - p.mask_blocks);
    }
  }
};

}  // namespace flash_dmattn::cuda::sm90
