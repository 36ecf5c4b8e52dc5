#pragma once

#include "cuda/sm80/few_queries/sums.cuh"

namespace flash_dmattn::cuda::sm80::few_queries {

// Adds the sums of the blocks of SplitForwardKernel in a fixed order, and stores the output and lse. A block computes a
// row, and a warp every warps-th split of the row.
template <class T, int D>
struct CombineKernel {
  using Params = few_queries::Params;
  static constexpr int warps = 8;
  static constexpr int threads = warps * warp_size;
  static constexpr int min_blocks = 2;
  static constexpr bool waits_itself = true;

  struct SharedStorage {
    LaneColumns<D> out[warps][warp_size];
    RowSums sums[warps];
  };

  static long blocks(const Params& p) {
    return static_cast<long>(p.shape.batch) * p.shape.heads_q * p.shape.seqlen_q;
  }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    allow_next_kernel();
    wait_for_previous_kernel();
    add_splits(p, shared, p.split.splits, p.shape.seqlen_k, AllKeys());
  }

 protected:
  // The query head of a block, of query `index` % Sq.
  static __device__ QueryHead head_of(const Params& p, std::int64_t index) {
    return query_head(p.shape, static_cast<int>(index / p.shape.seqlen_q));
  }

  template <class Present>
  static __device__ void add_splits(const Params& p, SharedStorage& shared, int splits, int keys,
                                    const Present& present) {
    const std::int64_t index = blockIdx.x;  // index in [B, Hq, Sq]
    const RowSums* const sums = p.sums + index * p.split.splits;
    const float* const outs = p.outs + index * p.split.splits * D;
    const QueryHead head = head_of(p, index);
    RowTotal<D> mine;
    mine.template add_parts<4>(
        warp_id(), warps, splits, [&](int n) { return sums + n; },
        [&](int n) { return outs + static_cast<std::int64_t>(n) * D; });
    shared.out[warp_id()][lane_id()] = mine.out;
    if (lane_id() == 0) shared.sums[warp_id()] = mine.sums;
    __syncthreads();
    if (warp_id() > 0) return;
    RowTotal<D> row;
    row.template add_parts<warps>(
        0, 1, warps, [&](int w) { return &shared.sums[w]; }, [&](int w) { return &shared.out[w]; });
    store_row<T, D>(p, head, static_cast<int>(index % p.shape.seqlen_q), keys, present, row);
  }
};

}  // namespace flash_dmattn::cuda::sm80::few_queries
