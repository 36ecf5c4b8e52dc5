#pragma once

#include "cuda/common/tile_states.cuh"
#include "cuda/sm90/forward_producer.cuh"
#include "cuda/sm90/tensor_map.h"

// Masks and biases with a query dimension, DenseAccess::tiles: the iterator over the key tiles of a work tile, and the
// producers that load their bits and biases besides K and V.
namespace flash_dmattn::cuda::sm90 {

// A work tile of 128 queries, or of 64 queries of two heads that share mask and bias, and its key tiles that are not
// empty in the packed mask. All lanes of a warp search for them together.
template <int Keys>
class DenseWork {
 public:
  WorkTile work;

  static int count(const Shape& shape, bool two_heads) {
    return WorkTile::count(shape_of_tiles(shape, two_heads), rows(two_heads));
  }

  __device__ DenseWork(const ForwardKernelParams& params, int number) {
    const ForwardParams& p = params.forward;
    work =
        get_queries(p, shape_of_tiles(p.shape, params.two_heads), rows(params.two_heads), number);
    if (params.two_heads) work.head *= 2;
    const KeyBounds bounds = key_bounds(p, work, rows(params.two_heads));
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
      if (!params.two_heads && row_tile + 1 < row_tiles) second_row_ = words_;
    }
    tile_ = find(begin);
    work.visits = 1;
    work.end = tile_ < end_ ? bounds.end : 0;
    // A work tile without keys visits one tile, too.
    if (tile_ == end_) tile_ = begin;
    look_ahead();
  }

  __device__ int key() const { return tile_ * Keys; }
  __device__ std::uint32_t flags() const { return flags_; }
  __device__ bool is(KeyTileFlag flag) const { return (flags_ & flag) != 0; }

  // Moves to the next tile that is visited.
  __device__ void advance() {
    tile_ = next_;
    look_ahead();
  }

 private:
  static __host__ __device__ int rows(bool two_heads) { return two_heads ? 64 : 128; }
  static __host__ __device__ Shape shape_of_tiles(Shape shape, bool two_heads) {
    if (two_heads) shape.heads_q /= 2;
    return shape;
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
    std::uint32_t merged = 0;
#pragma unroll
    for (int i = 0; i < tile_words; ++i) {
      const std::uint8_t* const at = states_ + min(tile * tile_words + i, words_ - 1);
      const std::uint32_t state = merge_states(__ldg(at), __ldg(at + second_row_));
      merged = i == 0 ? state : merge_states(merged, state);
    }
    return merged;
  }

  const std::uint8_t* states_ = nullptr;  // of the first 64 queries; null: nothing is masked
  int words_ = 0;
  int second_row_ = 0;  // distance to the states of the next 64 queries
  NonEmptyTiles search_;
  int full_begin_;  // first keys of the tiles that every query sees, but for the mask
  int full_end_;
  int end_;
  int tile_;
  int next_;
  std::uint32_t flags_;
};

// Consecutive keys by the TMA unit. One warp would take longer for all copies of a tile than the consumers, so three
// divide them: q and K, V, and bits and biases. They visit the same tiles. Each pipeline is filled by one warp: two that
// filled the three stages of bits and biases alternately could pass a barrier a phase early.
template <class Kernel>
struct DenseProducer : TmaProducer<Kernel> {
  using Base = TmaProducer<Kernel>;
  using Storage = typename Base::Storage;
  using Base::keys, Base::p, Base::storage;
  using Place = typename Base::Place;
  using Tile = DenseTile<keys>;
  using Biases = typename Tile::Biases;
  static constexpr int warpgroups = Kernel::policy.warpgroups;
  static constexpr int warps = 3;

  __device__ void run() const {
    const int warp = warp_id();
    if (warp >= warps) return;
    int n = 0;
    int work_count = 0;
    for (int number = static_cast<int>(blockIdx.x); number < p.work_tiles; ++work_count) {
      DenseWork<keys> tiles(p, number);
      int taken = 0;
      switch (warp) {
        case 0: taken = load_keys(tiles, work_count, n); break;
        case 1: load_values(tiles, n); break;
        default: load_dense(tiles, n);
      }
      number = share(taken, work_count);
    }
    if (warp == 0 && elect_lane()) this->load_end_of_work(work_count);
  }

 private:
  // Synchronizes the warps and returns `taken` of the first one's lane 0.
  __device__ int share(int taken, int work_count) const {
    int& number = storage.next_work[work_count % 2];
    if (threadIdx.x == 0) number = taken;
    __syncwarp();
    named_barrier_sync(Kernel::producer_barrier, warps * warp_size);
    return number;
  }

  // Calls visit() for each key tile of a work tile. `n`: key tiles of the block so far.
  template <class Visit>
  static __device__ void for_each_tile(DenseWork<keys>& tiles, int& n, const Visit& visit) {
    for (;; tiles.advance()) {
      visit();
      __syncwarp();
      ++n;
      if (tiles.is(last_of_work_tile)) return;
    }
  }

  // Loads q and K of a work tile; returns the number of the next one in lane 0.
  __device__ int load_keys(DenseWork<keys>& tiles, int work_count, int& n) const {
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

  __device__ void load_values(DenseWork<keys>& tiles, int& n) const {
    for_each_tile(tiles, n, [&] {
      if (elect_lane()) this->load_v(place_of(tiles), n);
    });
  }

  // A stage for the queries of each warpgroup; a work tile of two heads has one for both.
  __device__ void load_dense(DenseWork<keys>& tiles, int& n) const {
    const int stages = p.two_heads ? 1 : warpgroups;
    Source sources[warpgroups];
#pragma unroll
    for (int i = 0; i < warpgroups; ++i) {
      sources[i] = source_of(tiles.work, tiles.work.row + 64 * i);
    }
    for_each_tile(tiles, n, [&] {
      if (!elect_lane()) return;
      const bool masked = tiles.is(is_masked_tile);
#pragma unroll
      for (int i = 0; i < warpgroups; ++i) {
        if (i < stages) load_dense_tile(sources[i], tiles.key(), masked, n * stages + i);
      }
    });
  }

  static __device__ Place place_of(const DenseWork<keys>& tiles) {
    return {tiles.work.batch, tiles.work.kv_head, tiles.key()};
  }

  // The addresses of the bits and the coordinates of the biases of 64 queries.
  struct Source {
    const std::uint64_t* bits;  // of key 0
    int row;
    int2 bias;  // head and batch element in the bias' map
  };

  __device__ Source source_of(const WorkTile& work, int row) const {
    const ScoreParams& score = p.forward.score;
    const PackedMask& mask = score.packed_mask;
    const int row_tiles = ceil_div(p.forward.shape.seqlen_q, PackedMask::side);
    // Queries past the end read the last ones; they are not stored.
    const std::int64_t row_tile = mask.matrix(work.batch, work.head, work.kv_head) * row_tiles +
                                  min(row / PackedMask::side, row_tiles - 1);
    return {.bits = mask.bits + row_tile * mask.words * PackedMask::side,
            .row = row,
            .bias = index_in_map(score.bias, work.batch, work.head, work.kv_head)};
  }

  __device__ void load_dense_tile(const Source& source, int key, bool masked, int use) const {
    const ScoreParams& score = p.forward.score;
    auto& pipeline = storage.dense.pipeline;
    auto& tile = storage.dense.tile[pipeline.stage(use)];
    const int word = key / PackedMask::side;
    const int words = masked ? min(Tile::words, score.packed_mask.words - word) : 0;
    const auto bit_bytes = static_cast<std::uint32_t>(words * PackedMask::side * 8);
    const std::uint32_t bias_bytes = score.bias.dense ? Biases::bytes : 0;
    pipeline.wait_empty(use);
    const std::uint32_t full = pipeline.full_of(use);
    mbarrier_arrive_expect(full, bit_bytes + bias_bytes);
    if (masked) {
      bulk_load(shared_address(tile.bits), source.bits + word * PackedMask::side, bit_bytes, full);
    }
    if (bias_bytes == 0) return;
#pragma unroll
    for (int j = 0; j < Biases::panels; ++j) {
      tma_load(shared_address(tile.bias) + j * Biases::panel_bytes, p.bias_map, full,
               key + j * panel_columns, source.row, source.bias.x, source.bias.y);
    }
  }
};

}  // namespace flash_dmattn::cuda::sm90
