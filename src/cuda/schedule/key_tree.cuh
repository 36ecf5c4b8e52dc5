#pragma once

#include <cstdint>
#include <limits>

#include "common/query_tile_lists.h"
#include "cuda/primitives/divisor.h"
#include "cuda/selection/device.cuh"

// The tree of key lists through which tile lists are built (partition_keys.cuh): its root, its levels, its tiles.
namespace flash_dmattn::cuda::key_tree {

inline constexpr int threads = 512;
inline constexpr int warps = threads / warp_size;
inline constexpr int max_lists = warp_size;

// Lists of keys exist for nodes of at most this many tiles. Two half tiles of such a node fit into 32 bits.
inline constexpr int most_listed_bits = 13;
inline constexpr int most_listed_tiles = 1 << most_listed_bits;

// The queries that see a key, [begin, end) counted in half tiles. An odd begin is inside tile begin / 2, and an odd end
// is inside tile end / 2. (Both may be the same odd number.) A key that no query sees has 0 and 0.
struct HalfTiles {
  int begin;
  int end;

  __device__ int first_touched() const { return begin >> 1; }
  __device__ int end_touched() const { return (end + 1) >> 1; }
  __device__ int first_full() const { return (begin + 1) >> 1; }
  __device__ int end_full() const { return end >> 1; }
};

// A key and its half tiles, counted from the last multiple of most_listed_tiles before them. It belongs to a row or to a
// node of at most that many tiles.
struct Entry {
  using Stored = int2;

  int key;
  unsigned range;

  __device__ Entry(int key_, const HalfTiles& tiles)
      : key(key_),
        range(static_cast<unsigned>(tiles.end) << 16 | static_cast<unsigned>(tiles.begin)) {}
  __device__ explicit Entry(int2 stored) : key(stored.x), range(static_cast<unsigned>(stored.y)) {}

  __device__ int2 stored() const { return make_int2(key, static_cast<int>(range)); }
  // The part inside tiles [first, end), counted from `first`.
  __device__ HalfTiles within(int first, int end) const {
    const int before = 2 * (first % most_listed_tiles);
    return {max(static_cast<int>(range & 0xffffu) - before, 0),
            min(static_cast<int>(range >> 16) - before, 2 * (end - first))};
  }
};

// A key of a row of any length and its half tiles, counted from the first of the row.
struct LongRowEntry {
  using Stored = LongRowEntry;

  int key;
  HalfTiles tiles;

  LongRowEntry() = default;
  __device__ LongRowEntry(int key_, const HalfTiles& tiles_) : key(key_), tiles(tiles_) {}

  __device__ Stored stored() const { return *this; }
  __device__ HalfTiles within(int first, int end) const {
    return {max(tiles.begin, 2 * first) - 2 * first, min(tiles.end, 2 * end) - 2 * first};
  }
};

// The tiles below a node of a row.
struct Node {
  int row;
  int first_tile;
  int end_tile;
};

// The root, which has every key of a row with its interval. A root has up to 32 nodes of most_listed_tiles as children,
// so rows of more tiles have several roots. Rows of up to most_listed_tiles tiles may have the shorter `RowEntry`.
template <class RowEntry>
class AllKeys {
 public:
  explicit AllKeys(const TileListArgs& args)
      : intervals_(reinterpret_cast<const int2*>(args.intervals.data)),
        stride_batch_(args.intervals.stride_batch),
        stride_head_(args.intervals.stride_head),
        by_tile_rows_(static_cast<int>(args.tile_rows)),
        heads_(static_cast<int>(args.heads)),
        tile_rows_(static_cast<int>(args.tile_rows)),
        seqlen_q_(static_cast<int>(args.seqlen_q)),
        seqlen_k_(static_cast<int>(args.seqlen_k)),
        causal_shift_(args.causal ? static_cast<int>(args.seqlen_k - args.seqlen_q)
                                  : std::numeric_limits<int>::max()) {}

  class Items {
   public:
    using Entry = RowEntry;

    __device__ Items(const AllKeys& all, int row) : all_(all), intervals_(all.intervals_) {
      if (intervals_ != nullptr) {
        intervals_ += row / all.heads_ * all.stride_batch_ + row % all.heads_ * all.stride_head_;
      }
    }
    __device__ int size() const { return all_.seqlen_k_; }
    __device__ Entry operator[](int key) const {
      int2 queries = intervals_ == nullptr ? make_int2(0, all_.seqlen_q_) : intervals_[key];
      queries.x = max(queries.x, key - all_.causal_shift_);
      const int first = max(queries.x, 0);
      const int last = min(queries.y, all_.seqlen_q_);
      if (first >= last) return {key, {0, 0}};
      const int first_tile = all_.by_tile_rows_.divide(first);
      const int last_tile = all_.by_tile_rows_.divide(last - 1);
      // The last tile may be short; a key that all its queries see fills it.
      const bool ends_tile = last == all_.seqlen_q_ || last == (last_tile + 1) * all_.tile_rows_;
      return {key,
              {2 * first_tile + (first == first_tile * all_.tile_rows_ ? 0 : 1),
               2 * last_tile + (ends_tile ? 2 : 1)}};
    }

   private:
    const AllKeys& all_;
    const int2* intervals_;
  };

  __device__ Items items(int row, int) const { return {*this, row}; }
  __host__ __device__ int tiles() const {
    return seqlen_q_ == 0 ? 0 : by_tile_rows_.divide(seqlen_q_ - 1) + 1;
  }
  __host__ __device__ int nodes() const { return ceil_div(tiles(), node_tiles); }
  __device__ Node node(int row, int node) const {
    const int first = node * node_tiles;
    return {row, first, first + min(tiles() - first, node_tiles)};
  }

 private:
  static constexpr int node_tiles = max_lists * most_listed_tiles;

  const int2* intervals_;
  std::int64_t stride_batch_;
  std::int64_t stride_head_;
  Divisor by_tile_rows_;
  int heads_;
  int tile_rows_;
  int seqlen_q_;
  int seqlen_k_;
  int causal_shift_;  // position of query 0, or without causality so large that no key is too late
};

// The lists of one level of nodes.
class Level {
 public:
  Level() = default;
  // Nodes of 2^tile_bits tiles.
  Level(int tile_bits, int tiles, int capacity)
      : tile_bits_(tile_bits), tiles_(tiles), capacity_(capacity) {}

  void allocate(std::int64_t rows, WorkspaceAllocator& workspace) {
    entries_ = workspace.take<int2>(rows * nodes() * capacity_);
    counts_ = workspace.take<int>(rows * nodes());
  }

  __host__ __device__ int nodes() const { return ((tiles_ - 1) >> tile_bits_) + 1; }
  __host__ __device__ int capacity() const { return capacity_; }

  // The nodes' keys, if the level is a parent.
  class Items {
   public:
    using Entry = key_tree::Entry;

    __device__ Items(const int2* entries, int size) : entries_(entries), size_(size) {}
    __device__ int size() const { return size_; }
    __device__ Entry operator[](int i) const { return Entry(entries_[i]); }

   private:
    const int2* entries_;
    int size_;
  };
  __device__ Items items(int row, int node) const {
    return {entries_ + at(row, node) * capacity_, counts_[at(row, node)]};
  }
  __device__ Node node(int row, int node) const {
    return {row, node << tile_bits_, min((node + 1) << tile_bits_, tiles_)};
  }

  // The lists that a key joins, if the level has the children of `parent`. List b belongs to its b-th child.
  __device__ unsigned lists_of(const HalfTiles& tiles) const {
    if (tiles.first_touched() >= tiles.end_touched()) return 0;
    return bit_range(tiles.first_touched() >> tile_bits_,
                     ((tiles.end_touched() - 1) >> tile_bits_) + 1);
  }
  __device__ int first_place(int) const { return 0; }
  template <class ParentEntry>
  __device__ void store(const Node& parent, unsigned keys_of_list, int next,
                        const ParentEntry& entry) const {
    const int lane = lane_id();
    int2* const list = entries_ + at(parent.row, parent.first_tile >> tile_bits_) * capacity_;
    for (unsigned rest = warp_ballot(keys_of_list != 0); rest != 0; rest &= rest - 1) {
      const int b = __ffs(static_cast<int>(rest)) - 1;
      const unsigned keys = shuffle(keys_of_list, b);
      const int index = shuffle(next, b) + count_before(keys, lane);
      if ((keys >> lane & 1u) != 0 && index < capacity_) {
        list[std::int64_t{b} * capacity_ + index] =
            entry_of(entry, parent.first_tile + (b << tile_bits_)).stored();
      }
    }
  }
  // Called by all threads of the CTA that stores last; lane b of every warp has the length of list b.
  __device__ void finish(const Node& parent, int length) const {
    const int child = (parent.first_tile >> tile_bits_) + static_cast<int>(threadIdx.x);
    if (threadIdx.x < max_lists && child << tile_bits_ < parent.end_tile) {
      counts_[at(parent.row, child)] = min(length, capacity_);
    }
  }

 private:
  // The entry of a key in the list of a child.
  __device__ const Entry& entry_of(const Entry& entry, int) const { return entry; }
  __device__ Entry entry_of(const LongRowEntry& entry, int first_tile) const {
    return {entry.key, entry.within(first_tile, first_tile + (1 << tile_bits_))};
  }
  __device__ std::int64_t at(int row, int node) const {
    return static_cast<std::int64_t>(row) * nodes() + node;
  }

  int2* entries_ = nullptr;
  int* counts_ = nullptr;
  int tile_bits_ = 0;
  int tiles_ = 0;
  int capacity_ = 0;
};

// The tiles themselves, up to NodeTiles per parent. List b has the full keys of the b-th tile, and list NodeTiles + b
// the partial keys. Both share one range of memory, full keys first.
template <int NodeTiles>
struct Tiles {
  static_assert(2 * NodeTiles <= max_lists);

  int tiles = 0;
  bool by_position = false;  // all keys count as partial
  int padding = 1;
  int capacity = 0;
  std::int64_t* begin = nullptr;
  std::int32_t* count = nullptr;
  std::int32_t* full = nullptr;
  std::int32_t* keys = nullptr;

  __device__ unsigned lists_of(const HalfTiles& range) const {
    const unsigned touched = bit_range(range.first_touched(), range.end_touched());
    const unsigned filled = by_position ? 0 : bit_range(range.first_full(), range.end_full());
    return filled | (touched & ~filled) << NodeTiles;
  }
  // The first place of lane b's list, given its length.
  __device__ int first_place(int length) const {
    const int full_length = shuffle(length, lane_id() % NodeTiles);
    return lane_id() < NodeTiles ? 0 : full_length;
  }
  __device__ void store(const Node& parent, unsigned keys_of_list, int next,
                        const Entry& entry) const {
    const int lane = lane_id();
    const unsigned lists = lists_of(entry.within(parent.first_tile, parent.end_tile));
    std::int32_t* list = keys + at(parent, 0) * capacity;
#pragma unroll
    for (int b = 0; b < NodeTiles; ++b, list += capacity) {
      make_opaque(
          list);  // otherwise each store computes its address from the beginning of all lists
      // A key is in one of a tile's two lists. Each lane reads the list of its own key with two shuffles, which bind
      // this loop.
      const int own = (lists >> b & 1u) != 0 ? b : b + NodeTiles;
      const unsigned keys_of_own = shuffle(keys_of_list, own);
      const int index = shuffle(next, own) + count_before(keys_of_own, lane);
      if ((lists >> own & 1u) != 0 && index < capacity) list[index] = entry.key;
    }
  }
  // Called by all threads of the CTA that stores last; lane b of every warp has the length of list b.
  __device__ void finish(const Node& parent, int length) const {
    const int lane = lane_id();
    const int tile_count = parent.end_tile - parent.first_tile;
    for (int b = warp_id(); b < tile_count; b += warps) {
      const int full_length = shuffle(length, b);
      const int all = full_length + shuffle(length, b + NodeTiles);
      const int stored = min(all, capacity);
      const std::int64_t tile = at(parent, b);
      if (lane == 0) {
        begin[tile] = tile * capacity;
        count[tile] = stored;
        full[tile] = min(full_length, stored);
      }
      const int padded = ceil_div(stored, padding) * padding;
      std::int32_t* const list = keys + tile * capacity;
      for (int i = stored + lane; i < padded; i += warp_size) list[i] = 0;
    }
  }

 private:
  __device__ std::int64_t at(const Node& parent, int b) const {
    return static_cast<std::int64_t>(parent.row) * tiles + parent.first_tile + b;
  }
};

}  // namespace flash_dmattn::cuda::key_tree
