#pragma once

#include "cuda/sm90/panel_tile.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/policy.h"
#include "cuda/sm90/work_tile.cuh"

namespace flash_dmattn::cuda::sm90 {

template <int Stages, int Keys, bool Exists>
struct KeyInfoStorage {
  alignas(128) float bias[Stages][Keys];
  alignas(128) KeyInterval range[Stages][Keys];
};
template <int Stages, int Keys>
struct KeyInfoStorage<Stages, Keys, false> {};

// A dense mask and a dense bias of a warpgroup's queries, 64 or, of two heads, 32.
template <int Keys>
struct DenseTile {
  using Biases = PanelTile<64, Keys>;
  static constexpr int words = Keys / PackedMask::side;

  alignas(1024) std::byte bias[Biases::bytes];
  alignas(128) std::uint64_t bits[words][PackedMask::side];  // of a query 64 keys
};

// Properties of a key tile for the consumers, as bits.
enum KeyTileFlag : std::uint32_t {
  last_of_work_tile = 1,
  is_partial_tile = 2,
  is_masked_tile = 4,  // by the packed mask
};

template <int Stages, int KeyStages, int Keys>
struct DenseStorage {
  DenseTile<Keys> tile[Stages];
  std::uint32_t flags[KeyStages];
  Pipeline<Stages> pipeline;

  __device__ DenseTile<Keys>& of_use(int use) { return tile[pipeline.stage(use)]; }
};
template <int KeyStages, int Keys>
struct DenseStorage<0, KeyStages, Keys> {};

template <int D, ForwardPolicy P, bool HasKeyInfo>
struct ForwardStorage {
  static constexpr int work_stages = P.q_stages;
  // Key info is read after the buffer of K has been released.
  static constexpr int info_stages = 2 * P.stages;
  using QTile = PanelTile<P.rows(), D>;
  using KeyTile = PanelTile<P.keys, D>;

  alignas(1024) std::byte q[work_stages][QTile::bytes];
  alignas(1024) std::byte k[P.stages][KeyTile::bytes];
  alignas(1024) std::byte v[P.stages][KeyTile::bytes];
  DenseStorage<P.dense_stages, info_stages, P.keys> dense;
  KeyInfoStorage<info_stages, P.keys, HasKeyInfo> info;
  WorkTile work[work_stages];
  int next_work[2];  // among producers
  Pipeline<work_stages> q_pipeline;
  Pipeline<P.stages> k_pipeline;
  Pipeline<P.stages> v_pipeline;

  static __device__ int info_stage(int n) {
    return static_cast<int>(static_cast<unsigned>(n) % info_stages);
  }
};

}  // namespace flash_dmattn::cuda::sm90
