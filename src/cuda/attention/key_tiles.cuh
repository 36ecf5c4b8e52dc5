#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/scheduler.cuh"
#include "cuda/attention/tile_states.cuh"
#include "cuda/primitives/integers.h"

// Iterators over the key tiles of a query tile. They also know which tiles need element tests.
namespace flash_dmattn::cuda {

// Whether a query tile's keys come from a tile list. A kernel that is compiled for one case does not test this at every
// tile.
enum class KvSource : std::uint8_t { key_list, consecutive, either };

// The index of a query tile's list. `tile` has batch, kv_head and `row`, its first query.
template <class Tile>
__device__ inline std::int64_t list_of(const QueryTileLists& lists, const Tile& tile) {
  return tile.batch * lists.stride_batch + tile.kv_head * lists.stride_head +
         tile.row / query_tile_rows;
}

// The keys of a query tile: entries [begin, end) of its tile list, or consecutive keys without a list.
struct TileKeys {
  const int* list = nullptr;  // null for consecutive keys
  int begin = 0;              // a multiple of every tile's keys
  int end = 0;
  // The range of consecutive keys that are visible to every row by position and interval.
  int full_begin = 0;
  int full_end = 0;

  __device__ TileKeys(int first, int last) : begin(first), end(last) {}

  // `tile` has batch, kv_head and `row`, its first query.
  template <class Params, class Tile>
  __device__ TileKeys(const Params& p, const Tile& tile, int row_end) {
    const Shape& shape = p.shape;
    const int query_tile = tile.row / query_tile_rows;
    if (p.tile_lists.keys != nullptr) {
      const std::int64_t index = list_of(p.tile_lists, tile);
      list = p.tile_lists.keys + p.tile_lists.begin[index];
      end = p.tile_lists.count[index];
    } else if (p.key_ranges.data != nullptr) {
      const int4 range =
          __ldg(reinterpret_cast<const int4*>(p.key_ranges.data + tile.batch * p.key_ranges.batch +
                                              tile.kv_head * p.key_ranges.head + query_tile));
      begin = range.x;
      end = range.y;
      full_begin = range.z;
      full_end = range.w;
    } else {
      const int shift = shape.seqlen_k - shape.seqlen_q;
      const auto visible = [&](int position) {
        return p.score.causal ? max(min(position + 1, shape.seqlen_k), 0) : shape.seqlen_k;
      };
      end = visible(row_end - 1 + shift);
      if (p.score.intervals.data == nullptr) full_end = visible(tile.row + shift);
    }
  }
};

// Maps an index in a tile to its key.
template <KvSource Source>
struct TilePositions {
  const int* list;  // in shared memory; null for consecutive keys
  int first;

  __device__ bool listed() const {
    return Source == KvSource::key_list || (Source == KvSource::either && list != nullptr);
  }
  __device__ int operator[](int i) const { return listed() ? list[i] : first + i; }
};

// Visits every tile in order, so that the n-th visit is tile n.
struct EveryTile {
  __device__ int at(int n) const { return n; }
  __device__ bool is_unmasked(int) const { return false; }
  __device__ void advance(int) {}
};

// Visits the tiles of consecutive keys that are not empty in the packed mask of a query tile. The iterator knows the
// current tile and the next. Without a packed mask it visits every tile.
class VisibleTiles {
 public:
  // Tiles have `keys` keys, which divide the keys of a mask tile, and `rows` queries, at most two tiles of the mask.
  __device__ VisibleTiles(const PackedMask& mask, const QueryTile& tile, int seqlen_q, int rows,
                          const TileKeys& tile_keys, int keys)
      : keys_(keys), tiles_((tile_keys.end + keys - 1) / keys), current_(tile_keys.begin / keys) {
    if (mask.states != nullptr) {
      const std::int64_t matrix = mask.matrix(tile.batch, tile.head, tile.kv_head);
      const int row_tiles = ceil_div(seqlen_q, PackedMask::side);
      const int row_tile = tile.row / PackedMask::side;
      states_ = mask.states + (matrix * row_tiles + row_tile) * mask.words;
      if (rows > PackedMask::side && row_tile + 1 < row_tiles) second_row_ = mask.words;
    }
    found_[0] = find(current_);
    found_[1] = find(tile_of(found_[0]) + 1);
  }

  // Tile `n` is the current one or the next.
  __device__ int at(int n) const { return tile_of(entry(n)); }
  // Whether the tile has no masked element.
  __device__ bool is_unmasked(int n) const { return (entry(n) & 1) != 0; }

  __device__ void advance(int n) {
    if (n == current_) return;
    current_ = n;
    found_[0] = found_[1];
    found_[1] = find(tile_of(found_[0]) + 1);
  }

 private:
  static __device__ int tile_of(int entry) { return entry >> 1; }
  __device__ int entry(int n) const { return n == current_ ? found_[0] : found_[1]; }

  // Returns twice the number of the first visited tile from `tile` on, plus 1 if the tile is unmasked.
  __device__ int find(int tile) {
    const int found = search_.find(tile, tiles_, [&](int i) -> std::uint32_t {
      if (states_ == nullptr) return PackedMask::some | PackedMask::all;
      const std::uint8_t* const state = states_ + i * keys_ / PackedMask::side;
      return merge_states(__ldg(state), __ldg(state + second_row_));
    });
    return 2 * found + (search_.is_full(found) ? 1 : 0);
  }

  const std::uint8_t* states_ = nullptr;  // states of the query tile's first row of mask tiles
  int second_row_ = 0;                    // distance to the states of its second row, if it has two
  int keys_;
  int tiles_;
  int current_;
  int found_[2];
  NonEmptyTiles search_;
};

// The tiles of N keys that a query tile visits; `Tiles` selects among tiles of consecutive keys.
template <int N, KvSource kSource, class Tiles>
class KeyTileIterator {
 public:
  static constexpr int keys = N;
  static constexpr KvSource source = kSource;

  // With `has_key_values`, keys have a mask or a bias.
  __device__ KeyTileIterator(const TileKeys& tile_keys, const Tiles& tiles, bool has_key_values)
      : keys_(tile_keys),
        tiles_(tiles),
        full_begin_(tile_keys.full_begin / N),
        full_tiles_(has_key_values ? 0 : tile_keys.full_end / N - full_begin_) {}

  // The number of the first tile.
  __device__ int begin() const { return static_cast<int>(static_cast<unsigned>(keys_.begin) / N); }
  __device__ bool has(int n) const { return tiles_.at(n) < count(); }
  __device__ void advance(int n) { tiles_.advance(n); }

  // The position in the list or the sequence where the keys of tile n begin.
  __device__ int first(int n) const { return tiles_.at(n) * N; }
  // The number of existing keys of tile n, which are columns i < size(n).
  __device__ int size(int n) const { return min(keys_.end - first(n), N); }
  // The end of the last tile's keys.
  __device__ int end() const { return keys_.end; }

  // Whether every row sees all keys by position and interval, and no key has a mask or a bias.
  __device__ bool is_full(int n) const {
    return source != KvSource::key_list &&
           static_cast<unsigned>(tiles_.at(n) - full_begin_) < static_cast<unsigned>(full_tiles_);
  }
  // Whether the packed mask hides no element of the tile.
  __device__ bool is_unmasked(int n) const { return tiles_.is_unmasked(n); }

  __device__ bool has_list() const {
    return source == KvSource::key_list || (source == KvSource::either && keys_.list != nullptr);
  }
  __device__ const int* list() const { return keys_.list; }
  // Whether the list has a tile n. All tiles of a list are visited.
  __device__ bool list_has(int n) const { return n < count(); }

 private:
  // An unsigned division takes fewer instructions than a signed one.
  __device__ int count() const {
    return static_cast<int>((static_cast<unsigned>(keys_.end) + N - 1) / N);
  }

  TileKeys keys_;
  Tiles tiles_;
  int full_begin_;
  int full_tiles_;
};

}  // namespace flash_dmattn::cuda
