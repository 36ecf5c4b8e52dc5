#pragma once

#include "cuda/sm80/key_stream.cuh"
#include "cuda/sm80/pair_tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// Which tiles of consecutive keys a block visits, out of the states of the packed mask.
struct TileList {
  static constexpr int window = 256;    // tiles that are listed at a time
  static constexpr int full = 1 << 15;  // of an entry: nothing of the tile is masked

  std::uint16_t entries[window];  // tile of the window, and `full`
  int count;
};

template <class T, int D, int Rows, int N>
struct PairStreamStorage {
  using RowTile = SharedTile<N, D>;
  struct Stage {
    alignas(1024) std::byte k[RowTile::bytes];
    alignas(1024) std::byte v[RowTile::bytes];
    alignas(128) std::byte bias[BiasTile<Rows, N>::bytes];
    alignas(16) std::uint64_t mask[Rows];  // of the 64 keys that the tile is among
  };
  Stage stage[2];
  ColumnTile<N> columns[2];
  TileList list;
};

// KeyStream for a query tile with a mask or a bias of pairs: the tiles are a list made once, and
// with the rows of K and V come those of the bias and of the packed mask. A bias lies in_words.
template <class T, int D, int Rows, int N, int Threads>
class PairStream {
 public:
  using Storage = PairStreamStorage<T, D, Rows, N>;
  using RowTile = typename Storage::RowTile;
  using Order = EightByLane;

  __device__ PairStream(Storage& storage, const ForwardParams& p, const QueryTile& tile,
                        int row_end)
      : storage_(storage),
        p_(p),
        loader_(p.score, p.shape, tile.batch, tile.head, tile.kv_head),
        k_(p.k, tile.batch, tile.kv_head, p.shape.head_dim),
        v_(p.v, tile.batch, tile.kv_head, p.shape.head_dim),
        row_begin_(tile.row),
        row_end_(row_end),
        keys_(p, tile, row_end),
        has_values_(loader_.has_values()),
        window_(keys_.begin / N - TileList::window) {
    const Broadcast& bias = p.score.bias;
    bias_ = bias.data +
            2 * (tile.batch * bias.batch + tile.head * bias.head_q + tile.kv_head * bias.head_kv +
                 (tile.row + bias_row()) * bias.query + 8 * bias_chunk());
    const PackedMask& mask = p.score.packed_mask;
    const int row_tiles = (p.shape.seqlen_q + PackedMask::side - 1) / PackedMask::side;
    const std::int64_t matrix =
        tile.batch * mask.batch + tile.head * mask.head_q + tile.kv_head * mask.head_kv;
    const int row_tile = tile.row / PackedMask::side;
    state_row_ = (matrix * row_tiles + row_tile) * mask.words;
    two_row_tiles_ = Rows > PackedMask::side && row_tile + 1 < row_tiles;
  }

  // Lists the next tiles and sends for the first; false when there are no more.
  __device__ bool next_window() {
    window_ += TileList::window;
    if (window_ * N >= keys_.end) return false;
    __syncthreads();  // all are done with the window before
    if (threadIdx.x < 32) list_tiles();
    __syncthreads();
    count_ = storage_.list.count;
    if (count_ > 0) {
      next_ = storage_.list.entries[0];
      copy_tile(0);
      load_column();
      store_column(0);
    }
    return true;
  }

  __device__ int count() const { return count_; }

  // Makes tile n of the window ready and sends for the next one.
  __device__ void advance(int n) {
    entry_ = next_;
    cp_async_wait_all();
    __syncthreads();
    if (n + 1 < count_) {
      next_ = storage_.list.entries[n + 1];
      copy_tile(n + 1);
      load_column();
    }
  }

  // After the work on tile n.
  __device__ void finish(int n) {
    if (n + 1 < count_) store_column(n + 1);
  }

  __device__ std::uint32_t k_tile(int n) const { return shared_address(stage(n).k); }
  __device__ std::uint32_t v_tile(int n) const { return shared_address(stage(n).v); }
  // Of a warp's rows.
  template <int M16>
  __device__ PairTile<T, M16, N> pairs(int n, int warp_row) const {
    constexpr int halves = PackedMask::side / N;
    return {shared_address(stage(n).bias),
            shared_address(stage(n).mask) + static_cast<std::uint32_t>(entry_ % halves * 4),
            warp_row};
  }
  __device__ bool masked() const {
    return p_.score.packed_mask.bits != nullptr && (entry_ & TileList::full) == 0;
  }

  // Of columns(n), which are not there for a tile that is known to be visible to every row.
  __device__ std::uint32_t state(int n) const {
    return plain(entry_) ? ColumnTile<N>::touched : columns(n).tile_state();
  }
  __device__ const ColumnTile<N>& columns(int n) const { return storage_.columns[n % 2]; }

 private:
  using Bias = BiasTile<Rows, N>;
  static constexpr int bias_rows_at_once = Threads / Bias::chunks;

  static __device__ int bias_row() { return static_cast<int>(threadIdx.x) / Bias::chunks; }
  static __device__ int bias_chunk() { return static_cast<int>(threadIdx.x) % Bias::chunks; }

  __device__ typename Storage::Stage& stage(int n) const { return storage_.stage[n % 2]; }
  __device__ int first_key(int entry) const { return (window_ + entry % TileList::full) * N; }
  __device__ bool plain(int entry) const {
    const int first = first_key(entry);
    return !has_values_ && first >= keys_.whole_begin && first + N <= keys_.whole_end;
  }

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
        const std::uint8_t* const from =
            mask.states + state_row_ + (window_ + tile) * N / PackedMask::side;
        one = __ldg(from);
        two = two_row_tiles_ ? __ldg(from + mask.words) : one;
      }
      const bool visited = ((one | two) & PackedMask::some) != 0;
      const unsigned lanes = __ballot_sync(0xffffffffu, visited);
      if (visited) {
        storage_.list.entries[count + __popc(lanes & ((1u << lane) - 1))] =
            static_cast<std::uint16_t>(tile |
                                       ((one & two & PackedMask::all) != 0 ? TileList::full : 0));
      }
      count += __popc(lanes);
    }
    if (lane == 0) storage_.list.count = count;
  }

  // Of entry next_.
  __device__ void copy_tile(int n) {
    const int first = first_key(next_);
    const int size = min(p_.shape.seqlen_k - first, N);
    const bool whole = size == N && row_end_ == row_begin_ + Rows;
    if (whole && k_.aligned && v_.aligned && k_.all_exist) {
      copy_run<RowTile, Threads, Order>(k_, k_tile(n), first);
      copy_run<RowTile, Threads, Order>(v_, v_tile(n), first);
    } else {
      const auto exists = [&](int r) { return Order::key(r) < size; };
      const auto index = [&](int r) { return first + Order::key(r); };
      copy_rows<RowTile, Threads>(k_, k_tile(n), exists, index);
      copy_rows<RowTile, Threads>(v_, v_tile(n), exists, index);
    }
    if (p_.score.bias.per_query) copy_bias(n, first, whole);
    if (p_.score.packed_mask.bits != nullptr && (next_ & TileList::full) == 0) copy_mask(n, first);
  }

  __device__ void copy_bias(int n, int first, bool whole) {
    const std::uint32_t to = shared_address(stage(n).bias) + Bias::offset(bias_row(), bias_chunk());
    const std::byte* const from = bias_ + 2 * first;
    const std::int64_t step = 2 * bias_rows_at_once * p_.score.bias.query;
    const auto address = [&](int i) {
      return to + static_cast<std::uint32_t>(i * bias_rows_at_once * Bias::row_bytes);
    };
    constexpr int steps = Rows / bias_rows_at_once;
    if (whole) {
#pragma unroll
      for (int i = 0; i < steps; ++i) cp_async_16(address(i), from + i * step);
      return;
    }
    const int bytes = min(2 * (p_.shape.seqlen_k - first) - 16 * bias_chunk(), 16);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const bool exists = bytes > 0 && row_begin_ + bias_row() + i * bias_rows_at_once < row_end_;
      cp_async_part(address(i), exists ? from + i * step : p_.score.bias.data, exists ? bytes : 0);
    }
  }

  // Two rows for each thread.
  __device__ void copy_mask(int n, int first) {
    const int row = 2 * static_cast<int>(threadIdx.x);
    if (row >= Rows) return;
    const PackedMask& mask = p_.score.packed_mask;
    const int row_tile = row / PackedMask::side;
    const bool exists = row_tile == 0 || two_row_tiles_;
    const std::int64_t tile =
        state_row_ + (exists ? row_tile : 0) * mask.words + first / PackedMask::side;
    cp_async_16(shared_address(stage(n).mask) + static_cast<std::uint32_t>(row * 8),
                mask.bits + tile * PackedMask::side + row % PackedMask::side, exists);
  }

  __device__ void load_column() {
    const int i = static_cast<int>(threadIdx.x);
    const int key = first_key(next_) + Order::key(i);
    if (!plain(next_) && i < N) loader_.load(key, key < p_.shape.seqlen_k);
  }

  __device__ void store_column(int n) {
    const int i = static_cast<int>(threadIdx.x);
    if (!plain(next_) && i < N) loader_.store(storage_.columns[n % 2], i, row_begin_, row_end_);
  }

  Storage& storage_;
  const ForwardParams& p_;
  ColumnLoader<T> loader_;
  RowSource<RowTile> k_;
  RowSource<RowTile> v_;
  const std::byte* bias_;  // of this thread's first row and chunk
  std::int64_t state_row_;
  bool two_row_tiles_;
  int row_begin_;
  int row_end_;
  KeyList keys_;
  bool has_values_;
  int window_;
  int count_ = 0;
  int entry_ = 0;  // of the current tile
  int next_ = 0;   // of the one on its way
};

}  // namespace flash_dmattn::cuda::sm80
