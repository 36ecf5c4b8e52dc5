#pragma once

#include "cuda/attention/tile_states.cuh"
#include "cuda/sm90/dense/rows.h"
#include "cuda/sm90/forward/producer.cuh"

// Masks and biases with a query dimension, for DenseAccess::tiles: the iterator over the key tiles of a work tile, and
// the producers that load masks and biases in addition to K and V.
namespace flash_dmattn::cuda::sm90 {

// A work tile with the queries of all warpgroups, in one head or in two heads that share mask and bias, and its key
// tiles that are not empty in the mask. All lanes of a warp search for these together.
template <int Warpgroups, int Keys>
class DenseWork {
  static_assert(Warpgroups <= PackedMask::shared_row_tiles);

 public:
  WorkTile work;

  static int count(const ForwardKernelParams& params) {
    return WorkTile::count(shape_of_tiles(params), queries(params));
  }

  __device__ DenseWork(const ForwardKernelParams& params, int number) {
    const ForwardParams& p = params.forward;
    work = get_queries(p, shape_of_tiles(params), queries(params), number);
    if (params.two_heads) work.head *= 2;
    const int end_query = min(work.row + queries(params), p.shape.seqlen_q);
    const KeyBounds bounds = key_bounds_to(p, end_query);
    full_begin_ = bounds.full_begin;
    full_end_ = bounds.full_end - Keys;
    const int begin = bounds.begin / Keys;
    end_ = ceil_div(bounds.end, Keys);
    const PackedMask& mask = p.score.packed_mask;
    if (mask.states != nullptr) {
      const int row_tiles = ceil_div(p.shape.seqlen_q, PackedMask::side);
      const int row_tile = work.row / PackedMask::side;
      states_ =
          mask.states +
          (mask.matrix(work.batch, work.head, work.kv_head) * row_tiles + row_tile) * mask.words;
      words_ = mask.words;
      last_row_tile_ = (end_query - 1) / PackedMask::side - row_tile;
    }
    tile_ = find(begin);
    work.visits = 1;
    work.end = tile_ < end_ ? bounds.end : 0;
    // A work tile without keys also visits one tile.
    if (tile_ == end_) tile_ = begin;
    look_ahead();
  }

  __device__ int key() const { return tile_ * Keys; }
  __device__ std::uint32_t flags() const { return flags_; }
  __device__ bool is(KeyTileFlag flag) const { return (flags_ & flag) != 0; }

  // Moves to the next visited tile.
  __device__ void advance() {
    tile_ = next_;
    look_ahead();
  }

 private:
  static __host__ __device__ int queries(const ForwardKernelParams& params) {
    return Warpgroups * params.warpgroup_queries();
  }
  static __host__ __device__ Shape shape_of_tiles(const ForwardKernelParams& params) {
    Shape shape = params.forward.shape;
    if (params.two_heads) shape.heads_q /= 2;
    return shape;
  }

  // A key range has query_tile_rows queries, and a work tile overlaps two or three ranges.
  __device__ KeyBounds key_bounds_to(const ForwardParams& p, int end_query) const {
    WorkTile part = work;
    KeyBounds bounds = key_bounds(p, part, end_query - part.row);
    part.row -= part.row % query_tile_rows;
    while ((part.row += query_tile_rows) < end_query) {
      bounds = merge(bounds, key_bounds(p, part, end_query - part.row));
    }
    return bounds;
  }

  __device__ void look_ahead() {
    flags_ = states_ == nullptr || search_.is_full(tile_) ? 0 : is_masked_tile;
    if (key() < full_begin_ || key() > full_end_) flags_ |= is_partial_tile;
    next_ = find(tile_ + 1);
    if (next_ >= end_) flags_ |= last_of_work_tile;
  }

  __device__ int find(int tile) {
    return search_.find(tile, end_, [this](int i) { return state_of(i); });
  }

  __device__ std::uint32_t state_of(int tile) const {
    if (states_ == nullptr) return PackedMask::some | PackedMask::all;
    constexpr int tile_words = Keys / PackedMask::side;
    std::uint32_t merged = PackedMask::all;
#pragma unroll
    for (int i = 0; i < tile_words; ++i) {
      const std::uint8_t* const at = states_ + min(tile * tile_words + i, words_ - 1);
#pragma unroll
      for (int row = 0; row < Warpgroups; ++row) {
        merged = merge_states(merged, __ldg(at + min(row, last_row_tile_) * words_));
      }
    }
    return merged;
  }

  const std::uint8_t* states_ = nullptr;  // states of the first row tile; null without a mask
  int words_ = 0;                         // words of a row tile
  int last_row_tile_ = 0;                 // last row tile, relative to the first
  NonEmptyTiles search_;
  int full_begin_;  // begin of the tiles that every query sees, regardless of the mask
  int full_end_;
  int end_;
  int tile_;
  int next_;
  std::uint32_t flags_;
};

// Loads consecutive keys by the TMA unit. One warp would take longer for all copies of a tile than the consumers take
// for the tile, so all four warps divide them: q and K, V, biases, and masks. They visit the same tiles. A warp that
// fills a pipeline fills each of its stages, because two warps that filled three stages alternately could pass a
// barrier one phase early.
template <class Kernel>
struct DenseProducer : TmaProducer<Kernel> {
  using Base = TmaProducer<Kernel>;
  using Storage = typename Base::Storage;
  using Base::keys, Base::p, Base::storage;
  using Place = typename Base::Place;
  using Tile = typename Storage::DenseTile;
  using Biases = typename Tile::Biases;
  static constexpr int warpgroups = Kernel::policy.warpgroups;
  using Work = DenseWork<warpgroups, keys>;
  static constexpr int warps = 4;

  __device__ void run() const {
    const int warp = warp_id();
    int n = 0;
    int work_count = 0;
    for (int number = static_cast<int>(blockIdx.x); number < p.work_tiles; ++work_count) {
      Work tiles(p, number);
      int taken = 0;
      switch (warp) {
        case 0: taken = load_keys(tiles, work_count, n); break;
        case 1: load_values(tiles, n); break;
        case 2: load_biases(tiles, n); break;
        default: load_mask(tiles, n);
      }
      number = share(taken, work_count);
    }
    if (warp == 0 && elect_lane()) this->load_end_of_work(work_count);
  }

 private:
  // Synchronizes the warps and returns `taken` of lane 0 of the first warp.
  __device__ int share(int taken, int work_count) const {
    int& number = storage.next_work[work_count % 2];
    if (threadIdx.x == 0) number = taken;
    __syncwarp();
    named_barrier_sync(Kernel::producer_barrier, warps * warp_size);
    return number;
  }

  // Calls visit() for each key tile of a work tile. `n` is the number of key tiles of the block so far.
  template <class Visit>
  static __device__ void for_each_tile(Work& tiles, int& n, const Visit& visit) {
    for (;; tiles.advance()) {
      visit();
      __syncwarp();
      ++n;
      if (tiles.is(last_of_work_tile)) return;
    }
  }

  // Loads q and K of a work tile. Returns the number of the next work tile in lane 0.
  __device__ int load_keys(Work& tiles, int work_count, int& n) const {
    const typename Base::Info info = this->info_of(tiles.work);
    int taken = 0;
    if (elect_lane()) this->load_q(tiles.work, work_count);
    __syncwarp();
    for_each_tile(tiles, n, [&] {
      if (threadIdx.x == 0 && tiles.is(last_of_work_tile)) taken = this->take_work();
      __syncwarp();
      if (!elect_lane()) return;
      storage.dense.flags[Storage::info_stage(n)] = tiles.flags();
      this->load_k(info, place_of(tiles), tiles.is(is_partial_tile), n);
    });
    return taken;
  }

  __device__ void load_values(Work& tiles, int& n) const {
    for_each_tile(tiles, n, [&] {
      if (elect_lane()) this->load_v(place_of(tiles), n);
    });
  }

  // Loads the biases of each warpgroup's queries.
  __device__ void load_biases(Work& tiles, int& n) const {
    const Broadcast& bias = p.forward.score.bias;
    const int2 index = index_in_map(bias, tiles.work.batch, tiles.work.head, tiles.work.kv_head);
    const int queries = p.warpgroup_queries();
    const int bytes = bias.dense ? queries * keys * 2 : 0;
    for_each_tile(tiles, n, [&] {
      if (!elect_lane()) return;
#pragma unroll 1
      for (int i = 0; i < warpgroups; ++i) {
        const int use = n * warpgroups + i;
        const std::uint32_t full = expect_dense(use, bytes);
        if (bytes == 0) continue;
        const std::uint32_t to = shared_address(storage.dense.tile_of_use(use).bias);
#pragma unroll
        for (int j = 0; j < Biases::panels; ++j) {
          tma_load(to + j * Biases::panel_bytes, p.bias_map, full, tiles.key() + j * panel_columns,
                   tiles.work.row + i * queries, index.x, index.y);
        }
      }
    });
  }

  __device__ void load_mask(Work& tiles, int& n) const {
    if constexpr (Kernel::policy.has_mask_bytes) {
      if (p.reads_mask_bytes()) return load_bytes(tiles, n);
    }
    load_bits(tiles, n);
  }

  // Loads the mask's bytes of each warpgroup's queries.
  __device__ void load_bytes(Work& tiles, int& n) const {
    const Broadcast& mask = p.forward.score.mask;
    const int2 index = index_in_map(mask, tiles.work.batch, tiles.work.head, tiles.work.kv_head);
    const int queries = p.warpgroup_queries();
    for_each_tile(tiles, n, [&] {
      if (!elect_lane()) return;
#pragma unroll 1
      for (int i = 0; i < warpgroups; ++i) {
        const int use = n * warpgroups + i;
        const std::uint32_t full = expect_dense(use, queries * panel_row_bytes);
        tma_load(shared_address(storage.dense.tile_of_use(use).mask.bytes), p.mask_map, full,
                 tiles.key() / 2, tiles.work.row + i * queries, index.x, index.y);
      }
    });
  }

  // Loads the packed mask's bits of each warpgroup's queries. Queries past the last row tile read that tile and are not
  // stored.
  __device__ void load_bits(Work& tiles, int& n) const {
    constexpr int side = PackedMask::side;
    const PackedMask& mask = p.forward.score.packed_mask;
    const int row_tiles = ceil_div(p.forward.shape.seqlen_q, side);
    const std::uint64_t* const bits =
        mask.bits + mask.matrix(tiles.work.batch, tiles.work.head, tiles.work.kv_head) *
                        (std::int64_t{row_tiles} * mask.words * side);
    const int queries = p.warpgroup_queries();
    const int word_bytes = queries * static_cast<int>(sizeof(std::uint64_t));
    for_each_tile(tiles, n, [&] {
      if (!elect_lane()) return;
      const int word = tiles.key() / side;
      const int words = tiles.is(is_masked_tile) ? min(Tile::words, mask.words - word) : 0;
#pragma unroll 1
      for (int i = 0; i < warpgroups; ++i) {
        const int use = n * warpgroups + i;
        const std::uint32_t full = expect_dense(use, words * word_bytes);
        const int row = tiles.work.row + i * queries;
        const std::int64_t row_tile = min(row / side, row_tiles - 1);
        const std::uint64_t* const from = bits + (row_tile * mask.words + word) * side + row % side;
        const auto& to = storage.dense.tile_of_use(use).mask.bits;
#pragma unroll
        for (int j = 0; j < Tile::words; ++j) {
          if (j < words) bulk_load(shared_address(to[j]), from + j * side, word_bytes, full);
        }
      }
    });
  }

  // Waits for a warpgroup's stage of biases and masks; returns the barrier, which also waits for `bytes` bytes.
  __device__ std::uint32_t expect_dense(int use, int bytes) const {
    const auto& pipeline = storage.dense.pipeline;
    pipeline.wait_empty(use);
    const std::uint32_t full = pipeline.full_of(use);
    mbarrier_arrive_expect(full, bytes);
    return full;
  }

  static __device__ Place place_of(const Work& tiles) {
    return {tiles.work.batch, tiles.work.kv_head, tiles.key()};
  }
};

}  // namespace flash_dmattn::cuda::sm90
