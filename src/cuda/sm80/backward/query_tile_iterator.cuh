#pragma once

#include "cuda/attention/scheduler.cuh"
#include "cuda/attention/tile_states.cuh"
#include "cuda/primitives/integers.h"
#include "cuda/primitives/warp.cuh"
#include "cuda/sm80/params.h"

// Iterators over the query tiles of a block of the key-major backward.
namespace flash_dmattn::cuda::sm80 {

struct QueryTilePosition {
  int head;
  int row;
  bool masked;  // the packed mask hides some element
};

// Iterates over all tiles of `Rows` queries of some heads, one head after another.
template <int Rows>
class EveryQueryTile {
 public:
  struct Storage {};

  // Iterates over queries [begin, end) of heads [first_head, first_head + heads).
  __device__ EveryQueryTile(Storage&, const KeyMajorParams&, const KeyTile&, int first_head,
                            int heads, int begin, int end, bool)
      : heads_end_(first_head + heads),
        begin_(begin),
        end_(end),
        at_{end > begin ? first_head : heads_end_, begin, false} {}

  __device__ bool has() const { return at_.head < heads_end_; }
  __device__ int number() const { return 0; }  // no tile is skipped
  __device__ QueryTilePosition at() const { return at_; }
  __device__ void advance() {
    at_.row += Rows;
    if (at_.row >= end_) at_ = {at_.head + 1, begin_, false};
  }

 private:
  int heads_end_;
  int begin_;
  int end_;
  QueryTilePosition at_;
};

// Iterates over the tiles that are not empty in the packed mask. The tiles of all heads with the same queries are
// visited in sequence, so that the gradients of a bias that the heads share can be summed. Tiles are numbered row / 64
// * heads + head. One warp finds the next tile an iteration early and publishes it in shared memory, because the others
// have neither time nor registers for the search.
class MaskedQueryTiles {
 public:
  static constexpr int rows = PackedMask::side;

  struct Storage {
    int4 found[2];         // head, row, masked, number of the current tile and of the next
    NonEmptyTiles search;  // state of the warp that searches
  };

  // Iterates over queries [begin, end) of heads [first_head, first_head + heads). `searches` is true in one warp of the
  // block.
  __device__ MaskedQueryTiles(Storage& storage, const KeyMajorParams& p, const KeyTile& tile,
                              int first_head, int heads, int begin, int end, bool searches)
      : storage_(storage),
        mask_(p.score.packed_mask),
        tile_(tile),
        row_tiles_(ceil_div(p.shape.seqlen_q, rows)),
        first_head_(first_head),
        heads_(heads),
        end_(end > begin ? ceil_div(end, rows) * heads : 0),
        searches_(searches) {
    if (searches_) {
      NonEmptyTiles search;
      search = find(search, 0, end > begin ? begin / rows * heads : 0);
      find(search, 1, storage_.found[0].w + 1);
    }
    __syncthreads();
    current_ = storage_.found[0];
  }

  __device__ bool has() const { return current_.w < end_; }
  // The number of the current tile; after the last tile, the number of all tiles.
  __device__ int number() const { return current_.w; }
  __device__ QueryTilePosition at() const { return {current_.x, current_.y, current_.z != 0}; }
  // Called once between two barriers of the block.
  __device__ void advance() {
    slot_ = 1 - slot_;
    current_ = storage_.found[slot_];
    if (searches_) find(storage_.search, 1 - slot_, current_.w + 1);
  }

 private:
  // Publishes the first non-empty tile from `number` on.
  __device__ NonEmptyTiles find(NonEmptyTiles search, int slot, int number) {
    number = search.find(number, end_, [&](int tile) { return state(tile); });
    const bool has_tile = number < end_;
    if (!has_tile) number = row_tiles_ * heads_;
    __syncwarp();  // all lanes have read the last search
    if (lane_id() == 0) {
      storage_.search = search;
      storage_.found[slot] = {first_head_ + number % heads_, number / heads_ * rows,
                              has_tile && !search.is_full(number) ? 1 : 0, number};
    }
    __syncwarp();
    return search;
  }

  // The state of the mask's two tiles with the block's keys.
  __device__ std::uint32_t state(int number) const {
    if (mask_.states == nullptr) return PackedMask::some | PackedMask::all;
    const std::int64_t matrix =
        mask_.matrix(tile_.batch, first_head_ + number % heads_, tile_.kv_head);
    return state_of_keys(mask_, matrix * row_tiles_ + number / heads_,
                         tile_.key / PackedMask::side);
  }

  Storage& storage_;
  const PackedMask& mask_;
  KeyTile tile_;
  int row_tiles_;
  int first_head_;
  int heads_;
  int end_;
  bool searches_;
  int slot_ = 0;
  int4 current_;
};

}  // namespace flash_dmattn::cuda::sm80
