#pragma once

#include "cuda/sm80/key_stream.cuh"
#include "cuda/sm80/pair_tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// Which tiles of consecutive keys a block visits, out of the states of the packed mask.
struct TileList {
  static constexpr int window = 256;  // tiles that are listed at a time
  // Of an entry, beside the tile's first key: nothing of the tile is masked.
  static constexpr std::uint32_t full = 1;
  static constexpr std::uint32_t flags = 31;

  std::uint32_t entries[window];
  int count;
};

template <class T, int D, int Rows, int N>
struct PairStreamStorage {
  using RowTile = SharedTile<N, D>;
  struct Stage {
    alignas(1024) std::byte k[RowTile::bytes];
    alignas(1024) std::byte v[RowTile::bytes];
    alignas(128) std::byte bias[BiasTile<Rows, N>::bytes];
    alignas(
        128) std::byte mask[Rows * MaskBits::row_bytes];  // of the 64 keys that the tile is among
  };
  Stage stage[2];
  ColumnTile<N> columns[2];
  TileList list;
};

// KeyStream for a query tile with a mask or a bias of pairs: the tiles are a list made once, and
// with the rows of K and V come those of the bias and of the packed mask. A bias lies in_words.
// Addresses move from tile to tile: what follows from the block's position and the number of a tile
// the compiler computes anew at each, 150 instructions with 64-bit products.
template <class T, int D, int Rows, int N, int Threads>
class PairStream {
 public:
  using Storage = PairStreamStorage<T, D, Rows, N>;
  using RowTile = typename Storage::RowTile;
  using Stage = typename Storage::Stage;
  using Order = EightByLane;

  // For queries [tile.row, row_end), up to Rows.
  __device__ PairStream(Storage& storage, const ForwardParams& p, const QueryTile& tile,
                        int row_end)
      : storage_(storage),
        p_(p),
        loader_(p.score, p.shape, tile.batch, tile.head, tile.kv_head),
        row_begin_(tile.row),
        row_end_(row_end),
        keys_(p, tile, row_end),
        has_values_(loader_.has_values()),
        window_(before_first()),
        batch_(tile.batch),
        kv_head_(tile.kv_head),
        current_(shared_address(&storage.stage[0])),
        coming_(shared_address(&storage.stage[1])),
        k_(first_row(p.k)),
        v_(first_row(p.v)) {
    const Broadcast& bias = p.score.bias;
    bias_ = bias.data +
            2 * (tile.batch * bias.batch + tile.head * bias.head_q + tile.kv_head * bias.head_kv +
                 (tile.row + bias_row()) * bias.query + 8 * bias_chunk());
    const PackedMask& mask = p.score.packed_mask;
    const int row_tiles = (p.shape.seqlen_q + PackedMask::side - 1) / PackedMask::side;
    const std::int64_t matrix =
        tile.batch * mask.batch + tile.head * mask.head_q + tile.kv_head * mask.head_kv;
    const int row_tile = tile.row / PackedMask::side;
    states_ = mask.states + (matrix * row_tiles + row_tile) * mask.words;
    two_row_tiles_ = Rows > PackedMask::side && row_tile + 1 < row_tiles;
    const int row = tile.row + mask_row();
    mask_rows_exist_ = row / PackedMask::side < row_tiles;
    const std::int64_t first_word =
        (matrix * row_tiles + (mask_rows_exist_ ? row / PackedMask::side : 0)) * mask.words;
    mask_ = reinterpret_cast<const std::byte*>(mask.bits + first_word * PackedMask::side +
                                               row % PackedMask::side);
  }

  // Lists the next tiles and copies the first; false when there are no more.
  __device__ bool next_window() {
    cp_async_wait_all();
    __syncthreads();  // all are done with the window before
    window_ += TileList::window;
    if (window_ * N >= keys_.end) return false;
    if (threadIdx.x < warp_size) list_tiles();
    __syncthreads();
    count_ = storage_.list.count;
    if (count_ > 0) {
      next_ = storage_.list.entries[0];
      copy_tile();
      store_column(0);
    }
    return true;
  }

  __device__ int count() const { return count_; }

  // Makes tile n of the window the current one and starts copies of the next; finish(n) follows after the
  // work on tile n.
  __device__ void advance(int n) {
    entry_ = next_;
    const std::uint32_t free = current_;
    current_ = coming_;
    coming_ = free;
    cp_async_wait_all();
    __syncthreads();
    if (n + 1 < count_) {
      next_ = storage_.list.entries[n + 1];
      copy_tile();
    }
  }
  __device__ void finish(int n) {
    if (n + 1 < count_) store_column(n + 1);
  }

  // Of the current tile.
  __device__ std::uint32_t k_tile() const { return part(current_, offsetof(Stage, k)); }
  __device__ std::uint32_t v_tile() const { return part(current_, offsetof(Stage, v)); }
  // Of a warp's scores from a query on.
  template <int M16, class QueryOrder>
  __device__ PairTile<T, M16, N, QueryOrder> pairs(int first_query) const {
    constexpr unsigned halves = PackedMask::side / N;
    return {part(current_, offsetof(Stage, bias)),
            part(current_, offsetof(Stage, mask)) + entry_ / N % halves * 4, first_query};
  }
  __device__ bool masked() const {
    return p_.score.packed_mask.bits != nullptr && (entry_ & TileList::full) == 0;
  }

  // Of columns(n), which are not there for a tile that is known to be visible to every row.
  __device__ std::uint32_t state(int n) const {
    return is_plain(first_key(entry_)) ? ColumnTile<N>::touched : columns(n).tile_state();
  }
  __device__ const ColumnTile<N>& columns(int n) const { return storage_.columns[n % 2]; }

 private:
  using Bias = BiasTile<Rows, N>;
  static constexpr int bias_rows_at_once = Threads / Bias::chunks;
  static constexpr int bias_steps = Rows / bias_rows_at_once;
  static __device__ std::uint32_t part(std::uint32_t stage, std::size_t offset) {
    return stage + static_cast<std::uint32_t>(offset);
  }
  static __device__ int bias_row() { return static_cast<int>(threadIdx.x) / Bias::chunks; }
  static __device__ int bias_chunk() { return static_cast<int>(threadIdx.x) % Bias::chunks; }
  // Of the first of two that a thread copies; threads for rows past the last copy nothing.
  static __device__ int mask_row() { return 2 * static_cast<int>(threadIdx.x) % Rows; }

  // By one warp.
  __device__ void list_tiles() {
    const int lane = static_cast<int>(threadIdx.x);
    const PackedMask& mask = p_.score.packed_mask;
    const int end = min((keys_.end + N - 1) / N - window_, TileList::window);
    int count = 0;
    for (int begin = 0; begin < end; begin += 32) {
      const int tile = begin + lane;
      std::uint32_t one = tile < end ? PackedMask::some : 0u;
      std::uint32_t two = one;
      if (mask.states != nullptr && tile < end) {
        const std::uint8_t* const from = states_ + (window_ + tile) * N / PackedMask::side;
        one = __ldg(from);
        two = two_row_tiles_ ? __ldg(from + mask.words) : one;
      }
      const bool visited = ((one | two) & PackedMask::some) != 0;
      const unsigned lanes = warp_ballot(visited);
      if (visited) {
        const std::uint32_t entry = static_cast<std::uint32_t>((window_ + tile) * N) |
                                    ((one & two & PackedMask::all) != 0 ? TileList::full : 0);
        storage_.list.entries[count + count_before(lanes, lane)] = entry;
      }
      count += __popc(lanes);
    }
    if (lane == 0) storage_.list.count = count;
  }

  // Of the thread's part of a tile that is copied as a run.
  __device__ const std::byte* first_row(const InputRows& rows) const {
    const RowSource<RowTile> source(rows, batch_, kv_head_, p_.shape.head_dim);
    return source.data + static_cast<std::int64_t>(rows.row_step) *
                             Order::key(CopySteps<RowTile, Threads>::row());
  }

  static __device__ int first_key(std::uint32_t entry) {
    return static_cast<int>(entry & ~TileList::flags);
  }
  // Whether the tile from a key on has no columns.
  __device__ bool is_plain(int key) const {
    return !has_values_ && key >= keys_.whole_begin && key + N <= keys_.whole_end;
  }
  // The window before that of the first key.
  __device__ int before_first() const { return keys_.begin / N - TileList::window; }
  // Whether tiles without a tail are copied as runs.
  __device__ bool is_run() const {
    return row_end_ == row_begin_ + Rows && p_.k.aligned && p_.v.aligned && p_.shape.head_dim == D;
  }

  // From entry_ to next_.
  __device__ void move() {
    const int keys = first_key(next_) - first_key(entry_);
    k_ = row_after(k_, keys, p_.k.row_step);
    v_ = row_after(v_, keys, p_.v.row_step);
    bias_ += 2 * keys;
    constexpr int side = PackedMask::side;
    mask_ += (first_key(next_) / side - first_key(entry_) / side) * (side * 8);
  }

  __device__ void copy_tile() {
    move();
    const std::uint32_t k_tile = part(coming_, offsetof(Stage, k));
    const std::uint32_t v_tile = part(coming_, offsetof(Stage, v));
    const int size = min(p_.shape.seqlen_k - first_key(next_), N);
    const bool whole = size == N && is_run();
    if (whole) {
      copy_run<RowTile, Threads, Order>(k_, p_.k.row_step, k_tile);
      copy_run<RowTile, Threads, Order>(v_, p_.v.row_step, v_tile);
    } else {
      const auto exists = [&](int r) { return Order::key(r) < size; };
      const auto index = [&](int r) { return first_key(next_) + Order::key(r); };
      const auto source = [&](const InputRows& rows) {
        return RowSource<RowTile>(rows, batch_, kv_head_, p_.shape.head_dim);
      };
      copy_rows<RowTile, Threads>(source(p_.k), k_tile, exists, index);
      copy_rows<RowTile, Threads>(source(p_.v), v_tile, exists, index);
    }
    if (p_.score.bias.per_query) whole ? copy_bias_run() : copy_bias(size);
    copy_mask();
    load_column();
  }

  __device__ std::uint32_t bias_place() const {
    return part(coming_, offsetof(Stage, bias)) + Bias::offset(bias_row(), bias_chunk());
  }
  __device__ const std::byte* bias_of_step(int i) const {
    return bias_ + i * (2 * bias_rows_at_once * p_.score.bias.query);
  }

  __device__ void copy_bias_run() {
    const std::uint32_t to = bias_place();
#pragma unroll
    for (int i = 0; i < bias_steps; ++i) {
      cp_async_16(to + static_cast<std::uint32_t>(i * bias_rows_at_once * Bias::row_bytes),
                  bias_of_step(i));
    }
  }

  // Of `size` keys.
  __device__ void copy_bias(int size) {
    const std::uint32_t to = bias_place();
    const int bytes = min(2 * size - 16 * bias_chunk(), 16);
#pragma unroll 1
    for (int i = 0; i < bias_steps; ++i) {
      const bool exists = bytes > 0 && row_begin_ + bias_row() + i * bias_rows_at_once < row_end_;
      cp_async_part(to + static_cast<std::uint32_t>(i * bias_rows_at_once * Bias::row_bytes),
                    exists ? bias_of_step(i) : p_.score.bias.data, exists ? bytes : 0);
    }
  }

  // Unless it is full.
  __device__ void copy_mask() {
    const bool wanted = p_.score.packed_mask.bits != nullptr && (next_ & TileList::full) == 0;
    if (!wanted || 2 * static_cast<int>(threadIdx.x) >= Rows) return;
    cp_async_16(part(coming_, offsetof(Stage, mask)) + static_cast<std::uint32_t>(mask_row() * 8),
                mask_, mask_rows_exist_);
  }

  __device__ void load_column() {
    const int i = static_cast<int>(threadIdx.x);
    const int key = first_key(next_) + Order::key(i);
    if (!is_plain(first_key(next_)) && i < N) loader_.load(key, key < p_.shape.seqlen_k);
  }

  __device__ void store_column(int n) {
    const int i = static_cast<int>(threadIdx.x);
    if (!is_plain(first_key(next_)) && i < N)
      loader_.store(storage_.columns[n % 2], i, row_begin_, row_end_);
  }

  Storage& storage_;
  const ForwardParams& p_;
  ColumnLoader<T> loader_;
  int row_begin_;
  int row_end_;
  KeyList keys_;
  bool has_values_;
  int window_;
  const std::uint8_t* states_;
  bool two_row_tiles_;
  bool mask_rows_exist_;
  int count_ = 0;

  int batch_;
  int kv_head_;

  // The current tile.
  std::uint32_t current_;  // its stage's shared address
  std::uint32_t entry_ = 0;

  // The one on its way.
  std::uint32_t coming_;
  std::uint32_t next_ = 0;  // entry
  const std::byte* k_;      // this thread's first row and chunk
  const std::byte* v_;
  const std::byte* bias_;
  const std::byte* mask_;  // this thread's rows and the 64 keys
};

}  // namespace flash_dmattn::cuda::sm80
