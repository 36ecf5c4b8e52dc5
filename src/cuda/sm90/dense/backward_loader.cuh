#pragma once

#include "cuda/sm90/backward/storage.cuh"
#include "cuda/sm90/backward/work/query_visits.cuh"
#include "cuda/sm90/dense/dbias_writer.cuh"
#include "cuda/sm90/dense/rows.h"

namespace flash_dmattn::cuda::sm90 {

// Loads the bits of the packed mask and the biases of each query tile and a block of keys, for DenseAccess::tiles. If
// one warp also loaded q and dout, it would take longer than the consumers. Between loads the warp stores zeros of
// dbias.
template <class Kernel>
struct DenseTileLoader {
  using Storage = typename Kernel::SharedStorage;
  using ScoreTile = typename Storage::ScoreTile;
  using Dense = decltype(Storage::dense);
  static constexpr int rows = Kernel::policy.rows;
  static_assert(rows == PackedMask::side);

  const BackwardKernelParams& p;
  Storage& storage;

  // Called by a warp.
  __device__ void run(const BackwardWork& work) const {
    DbiasClearer<Kernel> zeros(p, storage, work);
    const int steps = zeros.steps_of_visit();
    int n = 0;
#pragma unroll 1
    for (QueryVisits<Kernel::variant> at(p, work); at.has(); at.advance(), ++n) {
      load(work, at, n);
#pragma unroll 1
      for (int i = 0; i < steps && zeros.step(); ++i) {
      }
    }
    zeros.finish();
  }

 private:
  template <class Visit>
  __device__ void load(const BackwardWork& work, const Visit& at, int n) const {
    // The products and the writer of dbias have read the previous dS of the tile.
    storage.dense.loaded.wait_empty(n);
    storage.dense.computed.wait_empty(n);
    if (elect_lane()) {
      const ScoreParams& score = p.backward.score;
      const int tile = Pipeline<Kernel::policy.score_tiles>::stage(n);
      const std::uint32_t full = storage.dense.loaded.full_of(n);
      // The consumers keep the biases of the previous visit.
      const bool loads = !Kernel::policy.keeps_biases || !at.has_same_dense();
      const std::uint32_t bit_bytes =
          loads && at.masked() ? existing_words(work) * PackedMask::side * 8 : 0;
      const std::uint32_t bias_bytes = loads && score.bias.dense ? ScoreTile::bytes : 0;
      mbarrier_arrive_expect(full, bit_bytes + bias_bytes);
      if (bit_bytes != 0) {
        bulk_load(shared_address(storage.dense.bits[tile]), bits_of(work, at), bit_bytes, full);
      }
      if (bias_bytes != 0) load_biases(work, at, shared_address(storage.ds[tile]), full);
    }
    __syncwarp();
  }

  __device__ std::uint32_t existing_words(const BackwardWork& work) const {
    const int left = p.backward.score.packed_mask.words - work.key / PackedMask::side;
    return static_cast<std::uint32_t>(min(left, Dense::words));
  }

  template <class Visit>
  __device__ const std::uint64_t* bits_of(const BackwardWork& work, const Visit& at) const {
    const PackedMask& mask = p.backward.score.packed_mask;
    const std::int64_t matrix = mask.matrix(work.batch, at.head(), work.kv_head);
    const std::int64_t tile =
        (matrix * ceil_div(p.backward.shape.seqlen_q, PackedMask::side) + at.tile()) * mask.words +
        work.key / PackedMask::side;
    return mask.bits + tile * PackedMask::side;
  }

  template <class Visit>
  __device__ void load_biases(const BackwardWork& work, const Visit& at, std::uint32_t to,
                              std::uint32_t full) const {
    const auto [head, batch] =
        index_in_map(p.backward.score.bias, work.batch, at.head(), work.kv_head);
#pragma unroll
    for (int i = 0; i < ScoreTile::panels; ++i) {
      tma_load(to + i * ScoreTile::panel_bytes, p.bias_map, full, work.key + i * panel_columns,
               at.tile() * rows, head, batch);
    }
  }
};

}  // namespace flash_dmattn::cuda::sm90
