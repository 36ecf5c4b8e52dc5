#pragma once

#include "cuda/sm80/tile/key_info.cuh"
#include "cuda/sm80/tile/kv_loader.cuh"
#include "cuda/sm80/tile/tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// The `Extra` of a pipeline that loads only K and V.
struct NoExtra {
  using Storage = NoStorage;
  template <class Group>
  __device__ void load(Group, Storage&, int, int, bool) const {}
};

// Stages and barriers of the tiles that an Iterator visits. While tile n is computed, these copies are in flight: the
// rows of tile n + 1 to shared memory, its key info to registers, and the listed keys of tile n + 2 to shared memory.
// With one stage the rows are loaded when the tile is computed. All threads of the block copy, and all wait at each
// tile.
//
// `Extra` loads more data for each tile of consecutive keys. `Tail` is storage of the kernel, in bytes that alignment
// would waste.
template <class T, int D, class Iterator, int Stages, int Threads, class Order = InOrder,
          class Extra = NoExtra, class Tail = NoStorage>
class KvPipeline {
 public:
  static constexpr int keys_per_tile = Iterator::keys;
  static_assert(std::is_same_v<Order, InOrder> || Iterator::source == KvSource::consecutive);
  using RowTile = SharedTile<keys_per_tile, D>;
  using Group = ThreadGroup<Threads>;
  using Loader = KvLoader<RowTile, Group, Order>;
  using Positions = TilePositions<Iterator::source>;
  using KeyInfo = KeyInfoTile<keys_per_tile>;

  struct Storage {
    // The positions of three tiles, which are being computed, gathered and loaded.
    static constexpr int position_stages = 3;
    struct Stage {
      alignas(1024) std::byte k[RowTile::bytes];
      alignas(1024) std::byte v[RowTile::bytes];
    };
    Stage stage[Stages];
    typename Extra::Storage extra[Stages];
    KeyInfo key_info[2];
    int positions[position_stages][keys_per_tile];
    typename Loader::Storage loader;
    Tail tail;
  };

  // Loads the keys of queries [row_begin, row_end).
  __device__ KvPipeline(Storage& storage, const Iterator& tiles, const Loader& loader,
                        const KeyInfoLoader<T>& key_info_loader, const Extra& extra, int row_begin,
                        int row_end)
      : storage_(storage),
        tiles_(tiles),
        loader_(loader),
        key_info_loader_(key_info_loader),
        extra_(extra),
        row_begin_(row_begin),
        row_end_(row_end) {}

  // Called before the first tile. It also waits for the caller's copies to shared memory.
  __device__ void start() {
    loader_.init(group());
    const int n = tiles_.begin();
    load_positions(n);
    load_positions(n + 1);
    cp_async_wait_all();
    __syncthreads();
    if constexpr (Stages == 2) load_rows(n);
    load_key_info(n);
    store_key_info(n);
  }

  // Usage: for (int n = begin(); has(n); ++n) { acquire(n); ...; release(n); }
  __device__ int begin() const { return tiles_.begin(); }
  __device__ bool has(int n) const { return tiles_.has(n); }

  // Makes tile n ready and starts copies of the next tiles.
  __device__ void acquire(int n) {
    tiles_.advance(n);
    if constexpr (Stages == 1) {
      __syncthreads();  // all warps are done with the previous tile
      load_rows(n);
    }
    cp_async_wait_all();
    __syncthreads();
    if (has(n + 1)) {
      if constexpr (Stages == 2) load_rows(n + 1);
      load_key_info(n + 1);
    }
    load_positions(n + 2);
  }

  // Called after the work on tile n.
  __device__ void release(int n) {
    if (has(n + 1)) store_key_info(n + 1);
  }

  __device__ const Iterator& tiles() const { return tiles_; }
  __device__ std::uint32_t k_tile(int n) const {
    return shared_address(storage_.stage[ring<Stages>(n)].k);
  }
  __device__ std::uint32_t v_tile(int n) const {
    return shared_address(storage_.stage[ring<Stages>(n)].v);
  }
  __device__ const typename Extra::Storage& extra(int n) const {
    return storage_.extra[ring<Stages>(n)];
  }
  // The state of key_info(n); a full tile has no key info.
  __device__ std::uint32_t state(int n) const {
    return tiles_.is_full(n) ? KeyInfo::touched : key_info(n).tile_state();
  }
  __device__ const KeyInfo& key_info(int n) const { return storage_.key_info[ring<2>(n)]; }
  __device__ Positions positions(int n) const {
    return {tiles_.has_list() ? storage_.positions[ring<Storage::position_stages>(n)] : nullptr,
            tiles_.first(n)};
  }
  // The number of existing keys of tile n, which are columns i < size(n).
  __device__ int size(int n) const { return tiles_.size(n); }
  __device__ int key(int n, int i) const { return positions(n)[i]; }
  // The key of a column of tile n, which differs from key() with another order.
  __device__ int key_of_column(int n, int column) const { return key(n, Order::key(column)); }

 private:
  static __device__ Group group() { return Group::of_block(); }

  __device__ void load_positions(int n) {
    const int i = group().rank;
    if (!tiles_.has_list() || i >= keys_per_tile || !tiles_.list_has(n)) return;
    const int entry = n * keys_per_tile + i;
    const bool valid = entry < tiles_.end();
    cp_async_4(shared_address(&storage_.positions[ring<Storage::position_stages>(n)][i]),
               tiles_.list() + (valid ? entry : 0), valid);
  }

  __device__ void load_rows(int n) {
    loader_.load(group(), positions(n), size(n), k_tile(n), v_tile(n));
    extra_.load(group(), storage_.extra[ring<Stages>(n)], tiles_.first(n), size(n),
                tiles_.is_unmasked(n));
  }

  __device__ void load_key_info(int n) {
    const int i = group().rank;
    if (tiles_.is_full(n) || i >= keys_per_tile) return;
    key_info_loader_.load(key(n, Order::key(i)), Order::key(i) < size(n));
  }

  __device__ void store_key_info(int n) {
    const int i = group().rank;
    if (tiles_.is_full(n) || i >= keys_per_tile) return;
    key_info_loader_.store(storage_.key_info[ring<2>(n)], i, row_begin_, row_end_);
  }

  Storage& storage_;
  Iterator tiles_;
  Loader loader_;
  KeyInfoLoader<T> key_info_loader_;
  Extra extra_;
  int row_begin_;
  int row_end_;
};

}  // namespace flash_dmattn::cuda::sm80
