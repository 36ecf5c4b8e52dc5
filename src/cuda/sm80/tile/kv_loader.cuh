#pragma once

#include "cuda/attention/key_tiles.cuh"
#include "cuda/primitives/tile_copy.cuh"

namespace flash_dmattn::cuda {

// Copies the rows of K and V of a tile of keys to shared memory, with any group of threads. It starts copies and waits
// for none. Column i of the tile is key Order::key(i).
template <class Tile, class Group, class Order>
class KvLoader {
 public:
  // The addresses of chunk i of row 0 of K and V. They are in shared memory, because the main loops have no registers
  // for them and computing them takes longer than a load.
  struct alignas(16) Chunk {
    const std::byte* k;
    const std::byte* v;
  };
  struct Storage {
    Chunk chunks[Tile::chunks];
  };

  template <class Params>
  __device__ KvLoader(Group group, Storage& storage, const Params& p, int batch, int kv_head)
      : storage_(storage),
        k_(group, p.k, batch, kv_head, p.shape.head_dim),
        v_(group, p.v, batch, kv_head, p.shape.value_dim),
        full_rows_(p.k.aligned && p.v.aligned && k_.full_width && v_.full_width) {}

  // Called before a barrier of the group and the first load.
  __device__ void init(Group group) const {
    if (group.rank < Tile::chunks) storage_.chunks[group.rank] = {k_.data, v_.data};
  }

  // Copies the first `size` keys of a tile; the other rows become zero.
  template <KvSource Source>
  __device__ void load(Group group, const TilePositions<Source>& keys, int size,
                       std::uint32_t k_tile, std::uint32_t v_tile) {
    const Chunk chunk = storage_.chunks[CopySteps<Tile, Group>::chunk(group)];
    k_.data = chunk.k;
    v_.data = chunk.v;
    if (full_rows_ && size == Tile::rows) {
      if (!keys.listed()) {
        copy_g2s_consecutive<Order>(group, k_, k_tile, keys.first);
        copy_g2s_consecutive<Order>(group, v_, v_tile, keys.first);
      } else {
        copy_g2s_gathered(group, k_, k_tile, v_, v_tile, keys.list);
      }
    } else {
      const auto exists = [&](int r) { return Order::key(r) < size; };
      const auto index = [&](int r) { return keys[Order::key(r)]; };
      copy_g2s(group, k_, k_tile, exists, index);
      copy_g2s(group, v_, v_tile, exists, index);
    }
  }

 private:
  Storage& storage_;
  RowSource<Tile, Group> k_;
  RowSource<Tile, Group> v_;
  bool full_rows_;  // aligned and as wide as the tile
};

}  // namespace flash_dmattn::cuda
