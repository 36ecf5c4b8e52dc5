#pragma once

#include "cuda/hopper/panel_tile.cuh"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/sm90/forward/work_tile.cuh"
#include "cuda/sm90/policy.h"

namespace flash_dmattn::cuda::sm90 {

// Delayed biases of a key tile that count for some but not all queries of a work tile.
template <int Stages, int Keys, bool Exists>
struct DelayedBiasStorage {
  alignas(128) float delayed[Stages][Keys];
  int begin[Stages][Keys];  // the first query for which a gathered key's bias counts
  // Whether the tile has such a bias. Each gathering warp sets its own flag, for its keys.
  alignas(4) bool exists[Stages][4];

  __device__ bool has_delayed(int stage) const {
    return *reinterpret_cast<const std::uint32_t*>(exists[stage]) != 0;
  }
  __device__ void set_delayed(int stage, bool any) {
    *reinterpret_cast<std::uint32_t*>(exists[stage]) = any ? 1 : 0;
  }
};
template <int Stages, int Keys>
struct DelayedBiasStorage<Stages, Keys, false> {};

template <int Stages, int Keys, bool Exists, bool Delays>
struct KeyInfoStorage : DelayedBiasStorage<Stages, Keys, Delays> {
  alignas(128) float bias[Stages][Keys];
  alignas(128) KeyInterval range[Stages][Keys];
};
template <int Stages, int Keys>
struct KeyInfoStorage<Stages, Keys, false, false> {};

// The dense mask of a warpgroup's queries, which are 64, or 32 with two heads. It has the mask's bits or, with
// HasBytes, its bytes or bits.
template <int Keys, bool HasBytes>
struct MaskTile {
  alignas(128) std::uint64_t bits[Keys / PackedMask::side][PackedMask::side];  // 64 keys of a query
};
template <int Keys>
struct MaskTile<Keys, true> {
  using Bytes = PanelTile<64, Keys / 2>;  // two keys per element

  union {
    alignas(1024) std::byte bytes[Bytes::bytes];
    std::uint64_t bits[Keys / PackedMask::side][PackedMask::side];
  };
};

// A dense mask and a dense bias.
template <int Keys, bool HasMaskBytes>
struct DenseTile {
  using Biases = PanelTile<64, Keys>;
  using Mask = MaskTile<Keys, HasMaskBytes>;
  static constexpr int words = Keys / PackedMask::side;

  alignas(1024) std::byte bias[Biases::bytes];
  Mask mask;
};

// The properties of a key tile for the consumers, as bits.
enum KeyTileFlag : std::uint32_t {
  last_of_work_tile = 1,
  is_partial_tile = 2,
  is_masked_tile = 4,  // the dense mask hides some element
};

template <class Tile, int Stages, int KeyStages>
struct DenseStorage {
  Tile tile[Stages];
  std::uint32_t flags[KeyStages];
  Pipeline<Stages> pipeline;

  __device__ Tile& tile_of_use(int use) { return tile[pipeline.stage(use)]; }
};
template <class Tile, int KeyStages>
struct DenseStorage<Tile, 0, KeyStages> {};

template <int D, int Dv, ForwardPolicy P, bool HasKeyInfo, bool Delays>
struct ForwardStorage {
  static constexpr int work_stages = P.q_stages;
  // Key info is read after the buffer of K has been released.
  static constexpr int info_stages = 2 * P.stages;
  using QTile = PanelTile<P.rows(), D>;
  using KeyTile = PanelTile<P.keys, D>;
  using ValueTile = PanelTile<P.keys, Dv>;
  using DenseTile = sm90::DenseTile<P.keys, P.has_mask_bytes>;

  alignas(1024) std::byte q[work_stages][QTile::bytes];
  alignas(1024) std::byte k[P.stages][KeyTile::bytes];
  alignas(1024) std::byte v[P.stages][ValueTile::bytes];
  DenseStorage<DenseTile, P.dense_stages, info_stages> dense;
  KeyInfoStorage<info_stages, P.keys, HasKeyInfo, Delays> info;
  WorkTile work[work_stages];
  int next_work[2];     // shared by the producers
  bool has_large_rows;  // of the block (repetition.cuh)
  Pipeline<work_stages> q_pipeline;
  Pipeline<P.stages> k_pipeline;
  Pipeline<P.stages> v_pipeline;

  static __device__ int info_stage(int n) {
    return static_cast<int>(static_cast<unsigned>(n) % info_stages);
  }
};

}  // namespace flash_dmattn::cuda::sm90
