#pragma once

#include "cuda/primitives/tile_copy.cuh"
#include "cuda/sm80/backward/query_tile_iterator.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/tile/tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// Copies the rows of q and dout, lse and delta of a query tile to shared memory, with any group of threads. It starts
// copies and waits for none. Rows past the end are zeros and see no key.
template <class Tile, class Group>
class QueryTileLoader {
 public:
  static constexpr int rows = Tile::rows;

  __device__ QueryTileLoader(const KeyMajorParams& p, int batch)
      : p_(p),
        batch_(batch),
        full_rows_(p.q.aligned && p.dout.aligned && p.shape.head_dim == Tile::columns &&
                   p.shape.value_dim == Tile::columns) {}

  __device__ void load(Group group, QueryTilePosition at, std::uint32_t q, std::uint32_t dout,
                       float (&lse)[rows], float (&delta)[rows]) const {
    const int size = p_.shape.seqlen_q - at.row;
    load_rows(group, p_.q, p_.shape.head_dim, at, size, q);
    load_rows(group, p_.dout, p_.shape.value_dim, at, size, dout);
    const std::int64_t first =
        (static_cast<std::int64_t>(batch_) * p_.shape.heads_q + at.head) * p_.shape.seqlen_q +
        at.row;
    static_assert(2 * rows % Group::size == 0);
#pragma unroll
    for (int step = 0; step < 2 * rows / Group::size; ++step) {
      const int i = group.rank + step * Group::size;
      const int row = i % rows;
      const std::int64_t from = first + (row < size ? row : 0);
      if (i < rows) {
        cp_async_4(shared_address(&lse[row]), p_.lse_log2 + from, row < size);
      } else {
        cp_async_4(shared_address(&delta[row]), p_.delta + from, row < size);
      }
    }
  }

 private:
  __device__ void load_rows(Group group, const InputRows& from, int columns, QueryTilePosition at,
                            int size, std::uint32_t to) const {
    const RowSource<Tile, Group> source(group, from, batch_, at.head, columns);
    if (full_rows_ && size >= rows) {
      copy_g2s_consecutive<InOrder>(group, source, to, at.row);
    } else {
      copy_g2s(group, source, to, size, [&](int r) { return at.row + r; });
    }
  }

  const KeyMajorParams& p_;
  int batch_;
  bool full_rows_;  // aligned and as wide as the tile
};

// Stages and barriers of the query tiles that an Iterator visits. While tile n is computed, the copies of tile n + 1 to
// shared memory are in flight. The first `Copiers` threads of the block copy, at a point that the main loop chooses,
// and all threads wait at each tile.
template <int Rows, int D, class Iterator, int Copiers>
class QueryPipeline {
 public:
  static constexpr int rows = Rows;
  using RowTile = SharedTile<rows, D>;
  using Group = ThreadGroup<Copiers>;
  using Loader = QueryTileLoader<RowTile, Group>;

  struct Storage {
    struct Stage {
      alignas(1024) std::byte q[RowTile::bytes];
      alignas(1024) std::byte dout[RowTile::bytes];
    };
    Stage stage[2];
    alignas(16) float lse[2][rows];
    alignas(16) float delta[2][rows];
  };

  __device__ QueryPipeline(Storage& storage, const Iterator& tiles, const Loader& loader)
      : storage_(storage), tiles_(tiles), loader_(loader) {}

  // Starts the copies of the iterator's tile, which is tile n. Called by the copiers.
  __device__ void load(int n) const {
    loader_.load(Group::of_block(), tiles_.at(), q_tile(n), dout_tile(n), storage_.lse[stage(n)],
                 storage_.delta[stage(n)]);
  }

  // Waits for the tile whose copies were started, and frees the previous one.
  __device__ void acquire() const {
    cp_async_wait_all();
    __syncthreads();
  }

  // Moves to the next tile; called once between two calls of acquire.
  __device__ void advance() { tiles_.advance(); }

  __device__ const Iterator& tiles() const { return tiles_; }
  __device__ std::uint32_t q_tile(int n) const {
    return shared_address(storage_.stage[stage(n)].q);
  }
  __device__ std::uint32_t dout_tile(int n) const {
    return shared_address(storage_.stage[stage(n)].dout);
  }
  __device__ const float* lse(int n) const { return storage_.lse[stage(n)]; }
  __device__ const float* delta(int n) const { return storage_.delta[stage(n)]; }

 private:
  static __device__ unsigned stage(int n) { return static_cast<unsigned>(n) % 2; }

  Storage& storage_;
  Iterator tiles_;
  Loader loader_;
};

}  // namespace flash_dmattn::cuda::sm80
