#pragma once

#include "cuda/attention/key_tiles.cuh"
#include "cuda/sm80/few_queries/choice.h"
#include "cuda/sm80/few_queries/rows.cuh"
#include "cuda/sm80/tile/key_info.cuh"
#include "cuda/sm80/tile/kv_loader.cuh"
#include "cuda/sm80/tile/tile.cuh"

namespace flash_dmattn::cuda::sm80::few_queries {

// The tiles of `N` keys of one of the `splits` blocks that share a row tile's keys, which are every splits-th tile.
// Blocks thus have equally many tiles even if a mask hides consecutive keys, and concurrent blocks read neighbouring
// tiles.
template <int N>
class SplitTiles {
 public:
  __device__ SplitTiles(const TileKeys& keys, bool has_key_values, int split, int splits)
      : keys_(keys), has_key_values_(has_key_values), split_(split), splits_(splits) {
    end_ = max(ceil_div(keys.end - keys.begin, N), 0);
  }

  // A division would give the number of tiles, and delay the first load.
  __device__ bool has(int n) const { return split_ + n * splits_ < end_; }
  // The position in the list or the sequence where the keys of the block's tile n begin.
  __device__ int first(int n) const { return keys_.begin + (split_ + n * splits_) * N; }
  // The number of existing keys of tile n, which are columns i < size(n).
  __device__ int size(int n) const { return min(keys_.end - first(n), N); }
  // Whether every row sees all keys by position and interval, and no key has a mask or a bias.
  __device__ bool is_full(int n) const {
    return !has_key_values_ && first(n) >= keys_.full_begin && first(n) + N <= keys_.full_end;
  }
  __device__ const int* list() const { return keys_.list; }

 private:
  TileKeys keys_;
  bool has_key_values_;
  int split_;
  int splits_;
  int end_;  // end of the row tile's tiles
};

// Stages and barriers of a block's tiles. While tile n is computed, these copies are in flight: the rows of the next
// stages - 1 tiles to shared memory, the key info of one more tile to registers, and the listed keys of another tile. A
// tile whose key info hides all its keys is not loaded. All stages are filled before the first tile, so that a block
// with few keys waits for memory once.
//
// `Info` reads and stores the key info of single keys, like KeyInfoLoader. load_token() is called before the rows are
// loaded, and prepare() before the first store, when the first loads are in flight.
template <int D, Policy P, class Info>
class SplitPipeline {
 public:
  static constexpr int stages = P.stages;
  using RowTile = SharedTile<P.keys, D>;
  using Group = ThreadGroup<P.warps() * warp_size>;
  using Loader = KvLoader<RowTile, Group, InOrder>;
  using Positions = TilePositions<KvSource::either>;
  using KeyInfo = KeyInfoTile<P.keys>;
  using Tiles = SplitTiles<P.keys>;

  struct Storage {
    struct Stage {
      alignas(1024) std::byte k[RowTile::bytes];
      alignas(1024) std::byte v[RowTile::bytes];
    };
    Stage stage[stages];
    KeyInfo key_info[stages + 1];
    int positions[stages + 2][P.keys];
    typename Loader::Storage loader;
  };

  __device__ SplitPipeline(Storage& storage, const Tiles& tiles, const Loader& loader,
                           const Info& info, const GroupRows& rows)
      : storage_(storage),
        tiles_(tiles),
        loader_(loader),
        info_(info),
        row_begin_(rows.first_query()),
        row_end_(rows.end_query()) {}

  // Called before the first tile and after the loader's init. `also` starts copies of the caller, which the wait for
  // the first tile includes.
  template <class Also>
  __device__ void start(const Also& also) {
#pragma unroll
    for (int n = 0; n <= stages; ++n) {
      load_positions(n);
      store_positions(n);
    }
    __syncthreads();
    // Key info is loaded first. After the rows, its loads, and thus the first tile, would wait for all rows.
    typename Info::Key keys[stages];
#pragma unroll
    for (int n = 0; n < stages; ++n) {
      if (has_key_info(n)) keys[n] = read_key_info(n);
    }
    info_.load_token();
#pragma unroll
    for (int n = 0; n < stages; ++n) {
      if (has(n)) load_rows(n);
      if (n == 0) also();
      cp_async_commit();
    }
    info_.prepare();
#pragma unroll
    for (int n = 0; n < stages; ++n) {
      if (has_key_info(n)) store_key_info(n, keys[n]);
    }
  }

  // Usage: for (int n = 0; has(n); ++n) { acquire(n); ...; release(n); }
  __device__ bool has(int n) const { return tiles_.has(n); }

  // Makes tile n ready and starts copies of the next tiles.
  __device__ void acquire(int n) {
    if (n == 0) {
      cp_async_wait<stages - 1>();
      __syncthreads();
    } else {
      cp_async_wait<stages - 2>();
      __syncthreads();
      const int next =
          n + stages - 1;  // goes to the stage of the previous tile, which all warps have read
      if (has(next) && (state(next) & KeyInfo::touched) != 0) load_rows(next);
      cp_async_commit();
    }
    if (has_key_info(n + stages)) key_ = read_key_info(n + stages);
    load_positions(n + stages + 1);
  }

  // Called after the work on tile n.
  __device__ void release(int n) {
    if (has_key_info(n + stages)) store_key_info(n + stages, key_);
    store_positions(n + stages + 1);
  }

  __device__ const Tiles& tiles() const { return tiles_; }
  __device__ const Info& info() const { return info_; }

  __device__ std::uint32_t k_tile(int n) const {
    return shared_address(storage_.stage[ring<stages>(n)].k);
  }
  __device__ std::uint32_t v_tile(int n) const {
    return shared_address(storage_.stage[ring<stages>(n)].v);
  }
  // The state of key_info(n); a full tile has no key info.
  __device__ std::uint32_t state(int n) const {
    return tiles_.is_full(n) ? KeyInfo::touched : key_info(n).tile_state();
  }
  __device__ const KeyInfo& key_info(int n) const { return storage_.key_info[ring<stages + 1>(n)]; }
  __device__ Positions positions(int n) const {
    return {tiles_.list() != nullptr ? storage_.positions[ring<stages + 2>(n)] : nullptr,
            tiles_.first(n)};
  }

 private:
  static __device__ Group group() { return Group::of_block(); }
  static __device__ bool has_key() { return group().rank < P.keys; }

  __device__ bool is_listed(int n) const { return tiles_.list() != nullptr && has_key() && has(n); }
  __device__ void load_positions(int n) {
    if (!is_listed(n)) return;
    // Columns past the end of the list take any existing key.
    position_ =
        group().rank < tiles_.size(n) ? __ldg(tiles_.list() + tiles_.first(n) + group().rank) : 0;
  }
  __device__ void store_positions(int n) {
    if (is_listed(n)) storage_.positions[ring<stages + 2>(n)][group().rank] = position_;
  }

  __device__ void load_rows(int n) {
    loader_.load(group(), positions(n), tiles_.size(n), k_tile(n), v_tile(n));
  }

  __device__ bool has_key_info(int n) const { return has_key() && has(n) && !tiles_.is_full(n); }
  __device__ typename Info::Key read_key_info(int n) const {
    const int i = group().rank;
    return info_.read(positions(n)[i], i < tiles_.size(n));
  }
  __device__ void store_key_info(int n, const typename Info::Key& key) {
    info_.store(key, storage_.key_info[ring<stages + 1>(n)], group().rank, row_begin_, row_end_);
  }

  Storage& storage_;
  Tiles tiles_;
  Loader loader_;
  Info info_;
  int row_begin_;
  int row_end_;
  // The key whose loads are in flight.
  typename Info::Key key_;
  int position_ = 0;
};

}  // namespace flash_dmattn::cuda::sm80::few_queries
