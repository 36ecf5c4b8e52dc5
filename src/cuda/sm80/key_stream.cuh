#pragma once

#include "cuda/common/scheduler.cuh"
#include "cuda/common/score.cuh"
#include "cuda/policy.h"
#include "cuda/sm80/tile.cuh"

// The key tiles a query tile visits, brought to shared memory ahead of their use.
namespace flash_dmattn::cuda::sm80 {

// Rows of one head, for a thread that copies chunk `chunk` of them. Columns from head_dim on are
// zero.
template <class Tile>
struct RowSource {
  const std::byte* data;   // of this thread's chunk
  std::int64_t row;        // bytes
  std::int64_t head_step;  // bytes
  int row_step;            // `row`, where aligned
  bool aligned;
  bool exists;     // the chunk is one of the row's
  bool all_exist;  // every chunk is

  __device__ RowSource(const InputRows& rows, int batch, int head, int head_dim)
      : data(rows.data + batch * rows.batch + head * rows.head + chunk() * 16),
        row(rows.row),
        head_step(rows.head),
        row_step(rows.row_step),
        aligned(rows.aligned),
        exists(chunk() < head_dim / 8),
        all_exist(head_dim == Tile::columns) {}

  static __device__ int chunk() { return static_cast<int>(threadIdx.x) % Tile::chunks; }

  // The same chunk of the n-th head after this one.
  __device__ RowSource of_head(int n) const {
    RowSource other = *this;
    other.data += n * head_step;
    return other;
  }

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

// Brings rows to a tile: row r of the tile is row index(r) of a head, source.of_head(head(r)), zeros
// where not exists(r). index(r) is the number of a row for every r.
template <class Tile, int Threads, class Exists, class Index, class Head>
__device__ inline void copy_rows(const RowSource<Tile>& source, std::uint32_t tile,
                                 const Exists& exists, const Index& index, const Head& head) {
  using Steps = CopySteps<Tile, Threads>;
  const int row = Steps::row();
  const int chunk = source.chunk();
  if (source.aligned) {
    const std::uint32_t base = tile + Tile::offset(row, chunk);
#pragma unroll
    for (int i = 0; i < Steps::steps; ++i) {
      const int r = row + i * Steps::rows_at_once;
      const bool valid = source.exists && exists(r);
      const std::byte* from =
          source.of_head(head(r)).data + static_cast<std::int64_t>(index(r)) * source.row_step;
      cp_async_16(Steps::to(tile, base, chunk, i), valid ? from : source.data, valid);
    }
  } else {
#pragma unroll 1
    for (int r = row; r < Tile::rows; r += Steps::rows_at_once) {
      const bool valid = source.exists && exists(r);
      store_shared_16(tile + Tile::offset(r, chunk),
                      valid ? source.of_head(head(r)).load_elements(index(r)) : uint4{0, 0, 0, 0});
    }
  }
}

template <class Tile, int Threads, class Exists, class Index>
__device__ inline void copy_rows(const RowSource<Tile>& source, std::uint32_t tile,
                                 const Exists& exists, const Index& index) {
  copy_rows<Tile, Threads>(source, tile, exists, index, [](int) { return 0; });
}

// Zeros where not r < size.
template <class Tile, int Threads, class Index>
__device__ inline void copy_rows(const RowSource<Tile>& source, std::uint32_t tile, int size,
                                 const Index& index) {
  copy_rows<Tile, Threads>(source, tile, [&](int r) { return r < size; }, index);
}

// The same for aligned rows that all exist: row r of the tile is row Order::key(r) from the tile's
// first, each address one multiply-add with constants. `from`: of the thread's own first row.
template <class Tile, int Threads, class Order>
__device__ inline void copy_run(const std::byte* from, int row_step, std::uint32_t tile) {
  using Steps = CopySteps<Tile, Threads>;
  const int chunk = RowSource<Tile>::chunk();
  const std::uint32_t base = tile + Tile::offset(Steps::row(), chunk);
#pragma unroll
  for (int i = 0; i < Steps::steps; ++i) {
    // Order::key permutes bits, and those of the two terms do not meet.
    cp_async_16(Steps::to(tile, base, chunk, i),
                from + static_cast<std::int64_t>(row_step) * Order::key(i * Steps::rows_at_once));
  }
}

template <class Tile, int Threads, class Order>
__device__ inline void copy_run(const RowSource<Tile>& source, std::uint32_t tile, int first) {
  const int row = first + Order::key(CopySteps<Tile, Threads>::row());
  copy_run<Tile, Threads, Order>(source.data + static_cast<std::int64_t>(row) * source.row_step,
                                 source.row_step, tile);
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

// Which key of a tile its column (and its row of K and V in shared memory) holds.
struct InOrder {
  static __device__ constexpr int key(int column) { return column; }
};

// So that the columns of a lane's accumulators, 8 n + 2 (l % 4) + {0, 1}, are eight neighbouring
// keys for each four n: their masks are a byte, their 16-bit biases a word of 16 bytes.
struct EightByLane {
  static __device__ constexpr int key(int column) {
    const int n = column / 8;
    return n / 4 * 32 + column % 8 / 2 * 8 + n % 4 * 2 + column % 2;
  }
};

// Keys of a query tile: places [begin, end) of the plan's list, else consecutive keys.
struct KeyList {
  const int* keys = nullptr;  // null: consecutive keys
  int begin = 0;              // a multiple of every tile's keys
  int end = 0;
  // Consecutive keys, known to be visible to every row by position and interval.
  int whole_begin = 0;
  int whole_end = 0;

  template <class Params>
  __device__ KeyList(const Params& p, const QueryTile& tile, int row_end) {
    const Shape& shape = p.shape;
    const int query_tile = tile.row / plan_tile_rows;
    if (p.plan.keys != nullptr) {
      const std::int64_t list =
          tile.batch * p.plan.stride_batch + tile.kv_head * p.plan.stride_head + query_tile;
      keys = p.plan.keys + p.plan.begin[list];
      end = p.plan.count[list];
    } else if (p.runs.data != nullptr) {
      const int4 run = __ldg(reinterpret_cast<const int4*>(
          p.runs.data + tile.batch * p.runs.batch + tile.kv_head * p.runs.head + query_tile));
      begin = run.x;
      end = run.y;
      whole_begin = run.z;
      whole_end = run.w;
    } else {
      const int shift = shape.seqlen_k - shape.seqlen_q;
      const auto visible = [&](int position) {
        return p.score.causal ? max(min(position + 1, shape.seqlen_k), 0) : shape.seqlen_k;
      };
      end = visible(row_end - 1 + shift);
      if (p.score.intervals.data == nullptr) whole_end = visible(tile.row + shift);
    }
  }
};

// The tiles of consecutive keys that are visited, in order: the n-th.
struct EveryTile {
  __device__ int at(int n) const { return n; }
  __device__ void move_to(int) {}
};

// Those that the packed mask does not leave empty. Only the current one and the next two are known.
class MaskedTiles {
 public:
  // Of the keys of `list` in tiles of `keys`, a divisor of the mask's, for `rows` queries, up to two
  // tiles of the mask. Without a packed mask every tile is visited.
  __device__ MaskedTiles(const PackedMask& mask, const QueryTile& tile, int seqlen_q, int rows,
                         const KeyList& list, int keys)
      : keys_(keys), tiles_((list.end + keys - 1) / keys), current_(list.begin / keys) {
    if (mask.states != nullptr) {
      const std::int64_t matrix =
          tile.batch * mask.batch + tile.head * mask.head_q + tile.kv_head * mask.head_kv;
      const int row_tiles = (seqlen_q + PackedMask::side - 1) / PackedMask::side;
      const int row_tile = tile.row / PackedMask::side;
      states_ = mask.states + (matrix * row_tiles + row_tile) * mask.words;
      const bool two = rows > PackedMask::side && row_tile + 1 < row_tiles;
      more_states_ = two ? states_ + mask.words : states_;
    }
    ahead_[0] = after(current_ - 1);
    ahead_[1] = after(ahead_[0]);
    ahead_[2] = after(ahead_[1]);
  }

  __device__ int at(int n) const {
    return n == current_ ? ahead_[0] : n == current_ + 1 ? ahead_[1] : ahead_[2];
  }

  __device__ void move_to(int n) {
    if (n == current_) return;
    current_ = n;
    ahead_[0] = ahead_[1];
    ahead_[1] = ahead_[2];
    ahead_[2] = after(ahead_[1]);
  }

 private:
  __device__ int after(int tile) {
    for (++tile; tile < tiles_; tile = (tile / 32 + 1) * 32) {
      if (tile / 32 != window_) load(tile / 32);
      const std::uint32_t left = some_ >> (tile % 32);
      if (left != 0) return tile + __ffs(static_cast<int>(left)) - 1;
    }
    return tiles_;
  }

  __device__ void load(int window) {
    window_ = window;
    const int tile = window * 32 + lane_id();
    std::uint32_t states = PackedMask::some;
    if (states_ != nullptr && tile < tiles_) {
      const int state = tile * keys_ / PackedMask::side;
      states = __ldg(states_ + state) | __ldg(more_states_ + state);
    }
    some_ = warp_ballot((states & PackedMask::some) != 0);
  }

  const std::uint8_t* states_ = nullptr;
  const std::uint8_t* more_states_ = nullptr;
  int keys_;
  int tiles_;
  int window_ = -1;
  std::uint32_t some_ = 0;
  int current_;
  int ahead_[3];
};

// Whether keys come by a list, which is not asked at every tile where it is known.
enum class KeySource : std::uint8_t { list, consecutive, either };

// `Rest`: what else the kernel keeps, in the bytes that alignment leaves.
template <class T, int D, int N, int Stages, class Rest>
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
  // Where chunk i of row 0 of K and V lies: the main loops have no registers to keep it in, and
  // forming it anew takes longer than reading it.
  struct alignas(16) Chunk {
    const std::byte* k;
    const std::byte* v;
  };
  Chunk chunks[RowTile::chunks];
  Rest rest;
};

struct NoStorage {};

// While tile n is computed, the rows of tile n + 1 are on their way to shared memory, the columns
// of n + 1 to registers, and the list of n + 2 to shared memory. With one stage the rows come when
// the tile is due. `Walk` chooses among tiles of consecutive keys.
template <class T, int D, int N, int Stages, int Threads, KeySource Source = KeySource::either,
          class Walk = EveryTile, class Rest = NoStorage>
class KeyStream {
 public:
  using Storage = KeyStreamStorage<T, D, N, Stages, Rest>;
  using RowTile = typename Storage::RowTile;

  // `list_positions`: keys() is asked for even where the keys are consecutive. The last tile has
  // them in any case, unless it is whole.
  __device__ KeyStream(Storage& storage, const KeyList& list, const Walk& walk,
                       const RowSource<RowTile>& k, const RowSource<RowTile>& v,
                       const ColumnLoader<T>& loader, int row_begin, int row_end,
                       bool list_positions)
      : storage_(storage),
        list_(list),
        walk_(walk),
        k_(k),
        v_(v),
        loader_(loader),
        row_begin_(row_begin),
        row_end_(row_end),
        listed_(list.keys != nullptr || list_positions),
        whole_rows_(k.aligned && v.aligned && k.all_exist),
        plain_begin_(list.whole_begin / N),
        plain_tiles_(loader.has_values() ? 0 : list.whole_end / N - plain_begin_) {}

  // The number of the first tile.
  __device__ int begin() const { return static_cast<int>(static_cast<unsigned>(list_.begin) / N); }
  __device__ bool has(int n) const { return walk_.at(n) < tiles(); }

  __device__ int keys_walked() const { return list_.end; }

  // Before the first tile. The caller's own copies to shared memory are waited for with these.
  __device__ void start() {
    if (threadIdx.x < RowTile::chunks) storage_.chunks[threadIdx.x] = {k_.data, v_.data};
    const int n = begin();
    list_keys(n);
    list_keys(n + 1);
    cp_async_wait_all();
    __syncthreads();
    if constexpr (Stages == 2) copy_tile(n);
    load_column(n);
    store_column(n);
  }

  // Makes tile n ready and starts copies of the next ones.
  __device__ void advance(int n) {
    walk_.move_to(n);
    if constexpr (Stages == 1) {
      __syncthreads();  // all are done with the tile before
      copy_tile(n);
    }
    cp_async_wait_all();
    __syncthreads();
    if (has(n + 1)) {
      if constexpr (Stages == 2) copy_tile(n + 1);
      load_column(n + 1);
    }
    list_keys(n + 2);
  }

  // After the work on tile n.
  __device__ void finish(int n) {
    if (has(n + 1)) store_column(n + 1);
  }

  __device__ std::uint32_t k_tile(int n) const {
    return shared_address(storage_.stage[in_turn<Stages>(n)].k);
  }
  __device__ std::uint32_t v_tile(int n) const {
    return shared_address(storage_.stage[in_turn<Stages>(n)].v);
  }
  // Of columns(n), which are not there for a tile that is known to be visible to every row.
  __device__ std::uint32_t state(int n) const {
    return plain(n) ? ColumnTile<N>::touched : columns(n).tile_state();
  }
  __device__ const ColumnTile<N>& columns(int n) const { return storage_.columns[in_turn<2>(n)]; }
  __device__ const int* keys(int n) const { return storage_.keys[in_turn<Storage::key_stages>(n)]; }
  // Of column i of tile n.
  __device__ int key(int n, int i) const { return listed() ? keys(n)[i] : first(n) + i; }
  // The first key of tile n, where keys are consecutive.
  __device__ int first(int n) const { return walk_.at(n) * N; }
  // Keys of tile n that exist: columns i with i < size(n).
  __device__ int size(int n) const { return min(list_.end - first(n), N); }

 private:
  // That no number is negative saves instructions.
  __device__ int tiles() const {
    return static_cast<int>((static_cast<unsigned>(list_.end) + N - 1) / N);
  }
  template <int Count>
  static __device__ int in_turn(int n) {
    return static_cast<int>(static_cast<unsigned>(n) % Count);
  }

  __device__ bool has_list() const {
    return Source == KeySource::list || (Source == KeySource::either && list_.keys != nullptr);
  }
  __device__ bool listed() const {
    return Source == KeySource::list || (Source == KeySource::either && listed_);
  }

  __device__ bool plain(int n) const {
    return Source != KeySource::list &&
           static_cast<unsigned>(walk_.at(n) - plain_begin_) < static_cast<unsigned>(plain_tiles_);
  }

  __device__ void list_keys(int n) {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= N || !has(n) || !(listed() || size(n) < N)) return;
    int& key = storage_.keys[in_turn<Storage::key_stages>(n)][i];
    const int position = first(n) + i;
    if (!has_list()) {
      key = position;
    } else {
      const bool valid = position < list_.end;
      cp_async_4(shared_address(&key), list_.keys + (valid ? position : 0), valid);
    }
  }

  __device__ void copy_tile(int n) {
    const auto chunk = storage_.chunks[k_.chunk()];
    k_.data = chunk.k;
    v_.data = chunk.v;
    if (whole_rows_ && size(n) == N) {
      if (!has_list()) {
        copy_run<RowTile, Threads, InOrder>(k_, k_tile(n), first(n));
        copy_run<RowTile, Threads, InOrder>(v_, v_tile(n), first(n));
      } else {
        gather_rows<RowTile, Threads>(k_, k_tile(n), v_, v_tile(n), keys(n));
      }
    } else {
      const auto exists = [&](int r) { return r < size(n); };
      const auto index = [&](int r) { return key(n, r); };
      copy_rows<RowTile, Threads>(k_, k_tile(n), exists, index);
      copy_rows<RowTile, Threads>(v_, v_tile(n), exists, index);
    }
  }

  __device__ void load_column(int n) {
    const int i = static_cast<int>(threadIdx.x);
    if (!plain(n) && i < N) loader_.load(key(n, i), i < size(n));
  }

  __device__ void store_column(int n) {
    const int i = static_cast<int>(threadIdx.x);
    if (!plain(n) && i < N) loader_.store(storage_.columns[in_turn<2>(n)], i, row_begin_, row_end_);
  }

  Storage& storage_;
  KeyList list_;
  Walk walk_;
  RowSource<RowTile> k_;
  RowSource<RowTile> v_;
  ColumnLoader<T> loader_;
  int row_begin_;
  int row_end_;
  bool listed_;
  bool whole_rows_;
  // Tiles without columns: consecutive keys that every row is known to see.
  int plain_begin_;
  int plain_tiles_;
};

}  // namespace flash_dmattn::cuda::sm80
