#pragma once

#include "cuda/common/score.cuh"
#include "cuda/sm80/tile.cuh"

// The key tiles a query tile visits, brought to shared memory ahead of their use.
namespace flash_dmattn::cuda::sm80 {

// Rows of one head, for a thread that copies chunk `chunk` of them. Columns from head_dim on are
// zero.
template <class Tile>
struct RowSource {
  const std::byte* data;  // of this thread's chunk
  std::int64_t row;       // bytes
  int row_step;           // the same, where aligned
  bool aligned;
  bool exists;     // the chunk is one of the row's
  bool all_exist;  // every chunk is

  __device__ RowSource(const HeadRows& rows, int batch, int head, int head_dim)
      : data(rows.data + batch * rows.batch + head * rows.head + chunk() * 16),
        row(rows.row),
        row_step(rows.row_step),
        aligned(rows.aligned),
        exists(chunk() < head_dim / 8),
        all_exist(head_dim == Tile::columns) {}

  static __device__ int chunk() { return static_cast<int>(threadIdx.x) % Tile::chunks; }

  __device__ uint4 load_elements(int index) const {
    const auto* from = reinterpret_cast<const std::uint16_t*>(data + index * row);
    const auto pair = [&](int i) {
      return from[i] | static_cast<std::uint32_t>(from[i + 1]) << 16;
    };
    return {pair(0), pair(2), pair(4), pair(6)};
  }
};

// How the threads of a block share the rows of a tile.
template <class Tile, int Threads>
struct CopySteps {
  static constexpr int rows_at_once = Threads / Tile::chunks;
  static constexpr int steps = Tile::rows / rows_at_once;

  static __device__ int row() { return static_cast<int>(threadIdx.x) / Tile::chunks; }

  // Where this thread's chunk of row row() + i rows_at_once belongs; `base` is that of i = 0. Rows a
  // multiple of 8 apart have the same swizzle.
  static __device__ std::uint32_t to(std::uint32_t tile, std::uint32_t base, int chunk, int i) {
    const int r = i * rows_at_once;
    return rows_at_once % 8 == 0 ? base + static_cast<std::uint32_t>(r * Tile::row_bytes)
                                 : tile + Tile::offset(row() + r, chunk);
  }
};

// Brings rows to a tile: row r of the tile is row index(r) of the head, zeros where not r < size.
// index(r) is the number of a row for every r.
template <class Tile, int Threads, class Index>
__device__ inline void copy_rows(const RowSource<Tile>& source, std::uint32_t tile, int size,
                                 const Index& index) {
  using Steps = CopySteps<Tile, Threads>;
  const int row = Steps::row();
  const int chunk = source.chunk();
  if (source.aligned) {
    const std::uint32_t base = tile + Tile::offset(row, chunk);
#pragma unroll
    for (int i = 0; i < Steps::steps; ++i) {
      const int r = row + i * Steps::rows_at_once;
      const bool valid = source.exists && r < size;
      const std::byte* from = source.data + static_cast<std::int64_t>(index(r)) * source.row_step;
      cp_async_16(Steps::to(tile, base, chunk, i), valid ? from : source.data, valid);
    }
  } else {
#pragma unroll 1
    for (int r = row; r < Tile::rows; r += Steps::rows_at_once) {
      const bool valid = source.exists && r < size;
      store_shared_16(tile + Tile::offset(r, chunk),
                      valid ? source.load_elements(index(r)) : uint4{0, 0, 0, 0});
    }
  }
}

// The same for aligned rows that all exist, of a run of consecutive rows: each address is one
// multiply-add with constants.
template <class Tile, int Threads>
__device__ inline void copy_run(const RowSource<Tile>& source, std::uint32_t tile, int first) {
  using Steps = CopySteps<Tile, Threads>;
  const std::uint32_t base = tile + Tile::offset(Steps::row(), source.chunk());
  const std::byte* const from =
      source.data + static_cast<std::int64_t>(first + Steps::row()) * source.row_step;
#pragma unroll
  for (int i = 0; i < Steps::steps; ++i) {
    cp_async_16(Steps::to(tile, base, source.chunk(), i),
                from + static_cast<std::int64_t>(source.row_step) * (i * Steps::rows_at_once));
  }
}

// The same for rows from anywhere, of two tensors at once: an index is read once for both.
template <class Tile, int Threads>
__device__ inline void gather_rows(const RowSource<Tile>& a, std::uint32_t a_tile,
                                   const RowSource<Tile>& b, std::uint32_t b_tile,
                                   const int* indices) {
  using Steps = CopySteps<Tile, Threads>;
  const std::uint32_t offset = Tile::offset(Steps::row(), a.chunk());
  int index[Steps::steps];
#pragma unroll
  for (int i = 0; i < Steps::steps; ++i) index[i] = indices[Steps::row() + i * Steps::rows_at_once];
#pragma unroll
  for (int i = 0; i < Steps::steps; ++i) {
    cp_async_16(Steps::to(a_tile, a_tile + offset, a.chunk(), i),
                a.data + static_cast<std::int64_t>(index[i]) * a.row_step);
  }
#pragma unroll
  for (int i = 0; i < Steps::steps; ++i) {
    cp_async_16(Steps::to(b_tile, b_tile + offset, b.chunk(), i),
                b.data + static_cast<std::int64_t>(index[i]) * b.row_step);
  }
}

// Keys of a query tile: those of the plan's list, else [0, end).
struct KeyList {
  const int* keys = nullptr;  // null: consecutive keys
  int count = 0;

  __device__ KeyList(const Plan& plan, const Shape& shape, bool causal, int batch, int kv_head,
                     int row_begin, int row_end) {
    if (plan.keys != nullptr) {
      const std::int64_t tile = batch * plan.stride_batch + kv_head * plan.stride_head +
                                row_begin / static_cast<int>(plan.tile_rows);
      keys = plan.keys + plan.begin[tile];
      count = plan.count[tile];
    } else {
      count = shape.seqlen_k;
      if (causal) count = max(min(count, row_end + shape.seqlen_k - shape.seqlen_q), 0);
    }
  }
};

template <class T, int D, int N, int Stages>
struct KeyStreamStorage {
  using RowTile = SharedTile<N, D>;
  // Keys of three tiles: in use, being gathered, being listed.
  static constexpr int key_stages = 3;

  struct Stage {
    alignas(1024) std::byte k[RowTile::bytes];
    alignas(1024) std::byte v[RowTile::bytes];
  };
  Stage stage[Stages];
  ColumnTile<N> columns[2];
  int keys[key_stages][N];
};

// While tile n is computed, the rows of tile n + 1 are on their way to shared memory, the columns
// of n + 1 to registers, and the list of n + 2 to shared memory. With one stage the rows come when
// the tile is due.
template <class T, int D, int N, int Stages, int Threads>
class KeyStream {
 public:
  using Storage = KeyStreamStorage<T, D, N, Stages>;
  using RowTile = typename Storage::RowTile;

  // `list_positions`: keys() is asked for even where the keys are consecutive.
  __device__ KeyStream(Storage& storage, const KeyList& list, const RowSource<RowTile>& k,
                       const RowSource<RowTile>& v, const ColumnLoader<T>& loader, int row_begin,
                       int row_end, bool list_positions)
      : storage_(storage),
        list_(list),
        k_(k),
        v_(v),
        loader_(loader),
        row_begin_(row_begin),
        row_end_(row_end),
        listed_(list.keys != nullptr || list_positions),
        whole_rows_(k.aligned && v.aligned && k.all_exist),
        plain_tiles_(list.keys == nullptr && !loader.has_columns()
                         ? max(loader.visible_to(row_begin), 0) / N
                         : 0) {}

  __device__ int tiles() const { return (list_.count + N - 1) / N; }

  __device__ int keys_walked() const { return list_.count; }

  // Before the first tile. The caller's own copies to shared memory are waited for with these.
  __device__ void start() {
    list_keys(0);
    list_keys(1);
    cp_async_wait_all();
    __syncthreads();
    if constexpr (Stages == 2) copy_tile(0);
    load_column(0);
    store_column(0);
  }

  // Makes tile n ready and sends for the next ones.
  __device__ void advance(int n) {
    if constexpr (Stages == 1) {
      __syncthreads();  // all are done with the tile before
      copy_tile(n);
    }
    cp_async_wait_all();
    __syncthreads();
    if (n + 1 < tiles()) {
      if constexpr (Stages == 2) copy_tile(n + 1);
      load_column(n + 1);
    }
    if (n + 2 < tiles()) list_keys(n + 2);
  }

  // After the work on tile n.
  __device__ void finish(int n) {
    if (n + 1 < tiles()) store_column(n + 1);
  }

  __device__ std::uint32_t k_tile(int n) const {
    return shared_address(storage_.stage[n % Stages].k);
  }
  __device__ std::uint32_t v_tile(int n) const {
    return shared_address(storage_.stage[n % Stages].v);
  }
  // Of columns(n), which are not there for a tile that is known to be visible to every row.
  __device__ std::uint32_t state(int n) const {
    return n < plain_tiles_ ? ColumnTile<N>::touched : columns(n).tile_state();
  }
  __device__ const ColumnTile<N>& columns(int n) const { return storage_.columns[n % 2]; }
  __device__ const int* keys(int n) const { return storage_.keys[n % Storage::key_stages]; }
  __device__ int key(int n, int i) const { return listed_ ? keys(n)[i] : n * N + i; }
  // Keys of tile n that exist.
  __device__ int size(int n) const { return min(list_.count - n * N, N); }

 private:
  __device__ void list_keys(int n) {
    const int i = static_cast<int>(threadIdx.x);
    if (!listed_ || i >= N) return;
    int& key = storage_.keys[n % Storage::key_stages][i];
    const int position = n * N + i;
    if (list_.keys == nullptr) {
      key = position;
    } else {
      const bool valid = position < list_.count;
      cp_async_4(shared_address(&key), list_.keys + (valid ? position : 0), valid);
    }
  }

  __device__ void copy_tile(int n) {
    if (whole_rows_ && n * N + N <= list_.count) {
      if (list_.keys == nullptr) {
        copy_run<RowTile, Threads>(k_, k_tile(n), n * N);
        copy_run<RowTile, Threads>(v_, v_tile(n), n * N);
      } else {
        gather_rows<RowTile, Threads>(k_, k_tile(n), v_, v_tile(n), keys(n));
      }
    } else {
      const auto index = [&](int r) { return key(n, r); };
      copy_rows<RowTile, Threads>(k_, k_tile(n), size(n), index);
      copy_rows<RowTile, Threads>(v_, v_tile(n), size(n), index);
    }
  }

  __device__ void load_column(int n) {
    const int i = static_cast<int>(threadIdx.x);
    if (n >= plain_tiles_ && i < N) loader_.load(key(n, i), i < size(n));
  }

  __device__ void store_column(int n) {
    const int i = static_cast<int>(threadIdx.x);
    if (n >= plain_tiles_ && i < N) {
      loader_.store(storage_.columns[n % 2], i, row_begin_, row_end_);
    }
  }

  Storage& storage_;
  KeyList list_;
  RowSource<RowTile> k_;
  RowSource<RowTile> v_;
  ColumnLoader<T> loader_;
  int row_begin_;
  int row_end_;
  bool listed_;
  bool whole_rows_;
  int plain_tiles_;  // the first ones: of consecutive keys without columns, visible to every row
};

}  // namespace flash_dmattn::cuda::sm80
