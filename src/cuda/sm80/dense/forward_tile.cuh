#pragma once

#include "cuda/attention/scheduler.cuh"
#include "cuda/attention/score.cuh"
#include "cuda/primitives/integers.h"
#include "cuda/primitives/tile_copy.cuh"
#include "cuda/sm80/dense/bias_tile.cuh"
#include "cuda/sm80/tile/fragment.cuh"
#include "cuda/sm80/tile/row_order.cuh"

// Dense masks and biases in shared memory. The mask is packed, and the bias aligned_16B.
namespace flash_dmattn::cuda::sm80 {

// The packed mask of Rows queries in shared memory, with the bits of 64 keys for each query.
template <int Rows>
struct MaskTile {
  static constexpr int row_bytes = 8;
  static constexpr int bytes = Rows * row_bytes;
};

// Loads the biases and masks of Rows queries with the keys of a tile, as Extra of KvPipeline.
template <int Rows, int N, class Group>
class DenseTileLoader {
 public:
  struct Storage {
    alignas(128) std::byte bias[BiasTile<Rows, N>::bytes];
    alignas(128) std::byte mask[MaskTile<Rows>::bytes];  // 64 keys that include the tile's keys
  };

  // Loads data of queries [tile.row, row_end).
  __device__ DenseTileLoader(Group group, const ScoreParams& score, int seqlen_q,
                             const QueryTile& tile, int row_end)
      : score_(score), rows_(row_end - tile.row) {
    const Broadcast& bias = score.bias;
    bias_ = bias.data + 2 * (bias.begin(tile.batch, tile.head, tile.kv_head) +
                             (tile.row + bias_row(group)) * bias.query + 8 * bias_chunk(group));
    const PackedMask& mask = score.packed_mask;
    const int row_tiles = ceil_div(seqlen_q, PackedMask::side);
    const std::int64_t matrix = mask.matrix(tile.batch, tile.head, tile.kv_head);
    const int row = tile.row + mask_row(group);
    mask_exists_ = row / PackedMask::side < row_tiles;
    const std::int64_t row_tile = matrix * row_tiles + (mask_exists_ ? row / PackedMask::side : 0);
    mask_ = mask.bits + row_tile * mask.words * PackedMask::side + row % PackedMask::side;
  }

  // Starts the copies. `size` keys exist. If `unmasked`, the mask is not read.
  __device__ void load(Group group, Storage& to, int first, int size, bool unmasked) const {
    if (score_.bias.dense) load_bias(group, shared_address(to.bias), first, size);
    if (!unmasked && size > 0) load_mask(group, shared_address(to.mask), first);
  }

 private:
  using Bias = BiasTile<Rows, N>;
  static constexpr int rows_at_once = Group::size / Bias::chunks;
  static constexpr int steps = Rows / rows_at_once;

  static __device__ int bias_row(Group group) { return group.rank / Bias::chunks; }
  static __device__ int bias_chunk(Group group) { return group.rank % Bias::chunks; }
  // The first of two rows that a thread copies; threads for rows past the last copy nothing.
  static __device__ int mask_row(Group group) { return 2 * group.rank % Rows; }

  __device__ void load_bias(Group group, std::uint32_t tile, int first, int size) const {
    const std::byte* const from = bias_ + 2 * first;
    const std::int64_t step = 2 * rows_at_once * score_.bias.query;
    const std::uint32_t to = tile + Bias::offset(bias_row(group), bias_chunk(group));
    if (size == N && rows_ == Rows) {
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        cp_async_16(to + static_cast<std::uint32_t>(i * rows_at_once * Bias::row_bytes),
                    from + i * step);
      }
      return;
    }
    const int bytes = min(2 * size - 16 * bias_chunk(group), 16);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const bool exists = bytes > 0 && bias_row(group) + i * rows_at_once < rows_;
      cp_async_part(to + static_cast<std::uint32_t>(i * rows_at_once * Bias::row_bytes),
                    exists ? from + i * step : score_.bias.data, exists ? bytes : 0);
    }
  }

  __device__ void load_mask(Group group, std::uint32_t tile, int first) const {
    if (2 * group.rank >= Rows) return;
    constexpr int side = PackedMask::side;
    cp_async_16(tile + static_cast<std::uint32_t>(mask_row(group) * MaskTile<Rows>::row_bytes),
                mask_ + first / side * side, mask_exists_);
  }

  const ScoreParams& score_;
  int rows_;
  bool mask_exists_;
  const std::byte* bias_;      // this thread's first row and chunk, at key 0
  const std::uint64_t* mask_;  // this thread's rows, at key 0
};

// Applies a tile's mask and bias to a warp's scores, M16 x 16 rows x N keys in LaneContiguous<8> order. A lane reads a
// byte of the mask and 16 bytes of the bias for each of its queries and 32 keys, once for both heads of an Order of
// two.
template <class T, int M16, int N, class Order>
class DenseTile {
 public:
  using Scores = float[M16][N / 8][4];

  // `first_key` is the first key of the tile, and `first_query` the warp's first query in the tile.
  template <class Storage>
  __device__ DenseTile(const Storage& storage, int first_key, int first_query) {
    const int query = first_query + lane_id() / 4;
    const int eight = lane_id() % 4;  // number of the lane's eight keys
    bias_ = shared_address(storage.bias) + Bias::offset(query, eight);
    mask_ = shared_address(storage.mask) + static_cast<std::uint32_t>(query * mask_row_bytes) +
            static_cast<std::uint32_t>(first_key % PackedMask::side / 8 + eight);
  }

  // x = factor x + bias, or -inf where the bias masks or, if the tile is `Masked`, where the mask masks.
  template <bool Masked>
  __device__ void add_bias(float factor, std::uint32_t mask_values, Scores& x) const {
    for_each_eight([&](int r, int j) {
      const uint4 four = load_shared_16((bias_ ^ static_cast<std::uint32_t>(64 * j)) +
                                        static_cast<std::uint32_t>(r * 8 * Bias::row_bytes));
      const std::uint32_t word[4] = {four.x, four.y, four.z, four.w};
      const std::uint32_t bits = Masked ? load_bits(r, j) : 0xff;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 bias = Element<T>::widen_packed2(hide_masking_biases<T>(word[i], mask_values));
        if ((bits >> (2 * i) & 1) == 0) bias.x = negative_infinity;
        if ((bits >> (2 * i + 1) & 1) == 0) bias.y = negative_infinity;
        for_each_head(x, r, 4 * j + i, [&](float& low, float& high) {
          low = fmaf(low, factor, bias.x);
          high = fmaf(high, factor, bias.y);
        });
      }
    });
  }

  // Sets scores to -inf where masked.
  __device__ void mask(Scores& x) const {
    for_each_eight([&](int r, int j) {
      const std::uint32_t bits = load_bits(r, j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        for_each_head(x, r, 4 * j + i, [&](float& low, float& high) {
          if ((bits >> (2 * i) & 1) == 0) low = negative_infinity;
          if ((bits >> (2 * i + 1) & 1) == 0) high = negative_infinity;
        });
      }
    });
  }

 private:
  static constexpr int queries = 2 * M16 / Order::heads;  // queries of a lane, 8 apart
  static constexpr int words = N / 32;
  static_assert(words <= 2);
  using Bias = BiasTile<8 * queries, N>;
  static constexpr int mask_row_bytes = MaskTile<8 * queries>::row_bytes;

  // Loads the bits of the lane's query r and of its eight keys among [32 j, 32 j + 32).
  __device__ std::uint32_t load_bits(int r, int j) const {
    return load_shared_1(mask_ + static_cast<std::uint32_t>(r * 8 * mask_row_bytes + 4 * j));
  }

  // Calls body(r, j) for the lane's queries r and keys [32 j, 32 j + 32), of which it has eight.
  template <class Body>
  __device__ static void for_each_eight(const Body& body) {
#pragma unroll
    for (int r = 0; r < queries; ++r) {
#pragma unroll
      for (int j = 0; j < words; ++j) body(r, j);
    }
  }

  // Calls body(the scores of two neighbouring keys) for the heads of query r.
  template <class Body>
  static __device__ void for_each_head(Scores& x, int r, int n, const Body& body) {
#pragma unroll
    for (int head = 0; head < Order::heads; ++head) {
      const int half = r * Order::heads + head;  // 8 rows
      float (&four)[4] = x[half / 2][n];
      body(four[half % 2 * 2], four[half % 2 * 2 + 1]);
    }
  }

  std::uint32_t bias_;
  std::uint32_t mask_;
};

}  // namespace flash_dmattn::cuda::sm80
