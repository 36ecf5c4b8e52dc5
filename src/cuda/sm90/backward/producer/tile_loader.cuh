#pragma once

#include "cuda/attention/rows.cuh"
#include "cuda/primitives/convert.cuh"
#include "cuda/sm90/backward/storage.cuh"
#include "cuda/sm90/backward/work/work.cuh"

namespace flash_dmattn::cuda::sm90 {

// Loads K and V of a work, then for each query tile q with the rows' stats, and dout.
template <class Kernel>
struct TileLoader {
  using T = typename Kernel::Element;
  using Storage = typename Kernel::SharedStorage;
  using Stats = typename Storage::Stats;
  static constexpr int rows = Kernel::policy.rows;

  const BackwardKernelParams& p;
  Storage& storage;

  // Called by a warp. `n` is the number of earlier query tiles of this block. Returns the new number.
  __device__ int run(const BackwardWork& work, int n) const {
    if (!work.has_tiles()) return n;
    const std::uint32_t flags = *p.backward.flags;
    if constexpr (!Kernel::has_slots) load_keys(work);
    const bool cleans_q = (flags & q_not_finite) != 0;
    const bool cleans_dout = (flags & dout_not_finite) != 0;
#pragma unroll 1
    for (QueryVisits<Kernel::variant> at(p, work); at.has(); at.advance(), ++n) {
      const int stage = storage.q_pipeline.stage(n);
      storage.q_pipeline.wait_empty(n);
      if constexpr (Kernel::variant.has_dense()) {
        if (elect_lane()) storage.dense.visits[stage] = at.loaded();
      }
      load<typename Storage::QueryTile>(p.q_map, p.backward.q, p.backward.shape.head_dim, cleans_q,
                                        work.batch, at.head(), at.tile() * rows,
                                        shared_address(storage.q[stage]),
                                        storage.q_pipeline.full_of(n), sizeof(Stats));
      if (elect_lane()) {
        const std::int64_t index =
            tile_index(p.backward.shape, rows, work.batch, at.head(), at.tile());
        bulk_load(shared_address(&storage.stats[stage]),
                  p.row_stats + index * (sizeof(Stats) / sizeof(float)), sizeof(Stats),
                  storage.q_pipeline.full_of(n));
      }
      __syncwarp();
      storage.dout_pipeline.wait_empty(n);
      load<typename Storage::DoutTile>(p.dout_map, p.backward.dout, p.backward.shape.value_dim,
                                       cleans_dout, work.batch, at.head(), at.tile() * rows,
                                       shared_address(storage.dout[storage.dout_pipeline.stage(n)]),
                                       storage.dout_pipeline.full_of(n), 0);
    }
    return n;
  }

 private:
  __device__ void load_keys(const BackwardWork& work) const {
    using KeyTile = typename Storage::KeyTile;
    using ValueTile = typename Storage::ValueTile;
    if (!elect_lane()) return;
    const std::uint32_t full = storage.key_pipeline.full_of(0);
    std::uint32_t bytes = KeyTile::bytes + ValueTile::bytes;
    if constexpr (Kernel::policy.paired()) bytes += Storage::Partner::KeyTile::bytes;
    mbarrier_arrive_expect(full, bytes);
#pragma unroll 1
    for (int i = 0; i < KeyTile::panels; ++i) {
      const int column = i * panel_columns;
      const std::uint32_t offset = i * KeyTile::panel_bytes;
      tma_load(shared_address(storage.k) + offset, p.k_map, full, column, work.key, work.kv_head,
               work.batch);
      if (i < ValueTile::panels) {
        tma_load(shared_address(storage.v) + offset, p.v_map, full, column, work.key, work.kv_head,
                 work.batch);
      }
    }
    if constexpr (Kernel::policy.paired()) {
      using Tile = typename Storage::Partner::KeyTile;
#pragma unroll 1
      for (int i = 0; i < Tile::panels; ++i) {
        tma_load(shared_address(storage.partner.k) + i * Tile::panel_bytes, p.k_map, full,
                 (Kernel::first_partner_panel() + i) * panel_columns, Kernel::partner_key(work),
                 work.kv_head, work.batch);
      }
    }
  }

  // `more_bytes` are the bytes of another copy that completes the same barrier.
  template <class Tile>
  __device__ void load(const CUtensorMap& map, const InputRows& source, int columns, bool cleans,
                       int batch, int head, int row, std::uint32_t tile, std::uint32_t full,
                       std::uint32_t more_bytes) const {
    if (cleans) {
      copy_cleaned<Tile>(source, columns, batch, head, row, tile);
      if (lane_id() == 0) mbarrier_arrive_expect(full, more_bytes);
    } else if (elect_lane()) {
      mbarrier_arrive_expect(full, Tile::bytes + more_bytes);
#pragma unroll 1
      for (int i = 0; i < Tile::panels; ++i) {
        tma_load(tile + i * Tile::panel_bytes, map, full, i * panel_columns, row, head, batch);
      }
    }
    __syncwarp();
  }

  // Copies rows through registers and replaces non-finite elements by 0. This is rare.
  template <class Tile>
  __device__ void copy_cleaned(const InputRows& source, int columns, int batch, int head, int row,
                               std::uint32_t tile) const {
    const Shape& shape = p.backward.shape;
#pragma unroll 1
    for (int i = lane_id(); i < rows * Tile::chunks; i += warp_size) {
      const int r = i / Tile::chunks;
      const int chunk = i % Tile::chunks;
      uint4 words{0, 0, 0, 0};
      if (row + r < shape.seqlen_q && chunk < columns / 8) {
        words = *(reinterpret_cast<const uint4*>(row_of<T>(source, batch, row + r, head)) + chunk);
      }
      store_shared_16(tile + Tile::offset(r, chunk), clear_non_finite_packed8<T>(words));
    }
    fence_async_proxy();
    __syncwarp();
  }
};

}  // namespace flash_dmattn::cuda::sm90
