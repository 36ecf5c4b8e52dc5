#pragma once

#include "cuda/common/fragment.cuh"
#include "cuda/common/scheduler.cuh"
#include "cuda/common/score.cuh"
#include "cuda/sm80/query_tile.cuh"

// Masks and biases with a query dimension for kernels whose scores are transposed, [keys, queries].
namespace flash_dmattn::cuda::sm80 {

// The query tiles that the packed mask does not leave empty; all heads' tiles of the same queries one after
// the other, so that their gradients of a bias they share can be summed. Tiles are numbered
// row / 64 * heads + head. One warp goes ahead, by a tile and a barrier of the block, and leaves in
// shared memory what it found: the others have neither time nor registers for it.
class MaskedQueryTiles {
 public:
  static constexpr int rows = PackedMask::side;

  struct Storage {
    int4 places[2];  // head, row, masked, number
    // Of the warp that goes ahead: the states of 32 tiles.
    int window;
    std::uint32_t some;
    std::uint32_t all;
  };

  // Of queries [begin, end). `goes_ahead`: one warp of the block.
  __device__ MaskedQueryTiles(Storage& storage, const PackedMask& mask, const KeyTile& tile,
                              int seqlen_q, int first_head, int heads, int begin, int end,
                              bool goes_ahead)
      : storage_(storage),
        mask_(mask),
        tile_(tile),
        row_tiles_((seqlen_q + rows - 1) / rows),
        first_head_(first_head),
        heads_(heads),
        end_(end > begin ? (end + rows - 1) / rows * heads : 0),
        goes_ahead_(goes_ahead) {
    if (goes_ahead_) {
      if (lane() == 0) storage_.window = -1;
      __syncwarp();
      find(0, end > begin ? begin / rows * heads : 0);
      find(1, storage_.places[0].w + 1);
    }
    __syncthreads();
    place_ = storage_.places[0];
  }

  __device__ bool has() const { return place_.w < end_; }
  // After the last one, the number of all tiles.
  __device__ int number() const { return place_.w; }
  __device__ QueryPlace place() const { return {place_.x, place_.y, place_.z != 0}; }
  // Once between two barriers of the block.
  __device__ void advance() {
    at_ = 1 - at_;
    place_ = storage_.places[at_];
    if (goes_ahead_) find(1 - at_, place_.w + 1);
  }

 private:
  static __device__ int lane() { return lane_id(); }

  // Leaves the first tile from `number` on that is not empty.
  __device__ void find(int at, int number) {
    int found = row_tiles_ * heads_;
    for (; number < end_; number = (number / 32 + 1) * 32) {
      if (number / 32 != storage_.window) load(number / 32);
      const std::uint32_t left = storage_.some >> (number % 32);
      if (left == 0) continue;
      found = number + __ffs(static_cast<int>(left)) - 1;
      break;
    }
    const bool masked = mask_.states != nullptr && (storage_.all >> (found % 32) & 1) == 0;
    if (lane() == 0) {
      storage_.places[at] = {first_head_ + found % heads_, found / heads_ * rows, masked ? 1 : 0,
                             found};
    }
    __syncwarp();
  }

  // The states of 32 tiles, one for each lane.
  __device__ void load(int window) {
    const int number = window * 32 + lane();
    std::uint32_t some = number < end_ ? PackedMask::some : 0u;
    std::uint32_t all = 0;
    if (mask_.states != nullptr && number < end_) {
      const std::int64_t matrix = tile_.batch * mask_.batch +
                                  (first_head_ + number % heads_) * mask_.head_q +
                                  tile_.kv_head * mask_.head_kv;
      const int word = tile_.key / PackedMask::side;
      const std::uint8_t* from =
          mask_.states + (matrix * row_tiles_ + number / heads_) * mask_.words + word;
      const std::uint32_t one = __ldg(from);
      const std::uint32_t two = word + 1 < mask_.words ? __ldg(from + 1) : one;
      some = (one | two) & PackedMask::some;
      all = one & two & PackedMask::all;
    }
    some = warp_ballot(some != 0);
    all = warp_ballot(all != 0);
    __syncwarp();  // all lanes have read the last window
    if (lane() == 0) {
      storage_.window = window;
      storage_.some = some;
      storage_.all = all;
    }
    __syncwarp();
  }

  Storage& storage_;
  const PackedMask& mask_;
  KeyTile tile_;
  int row_tiles_;
  int first_head_;
  int heads_;
  int end_;
  bool goes_ahead_;
  int at_ = 0;
  int4 place_;
};

// The biases of a warp's 32 keys and 64 queries in shared memory, [queries][keys]. Two rows are 128
// bytes; the 16 lanes of a step of an 8-byte load have 32 bytes each of four of these, which have to
// lie in different banks.
struct WarpBiasTile {
  static constexpr int bytes = 4096;
  static constexpr int row_bytes = 64;

  static __device__ std::uint32_t offset(int row, int chunk) {
    return static_cast<std::uint32_t>(row / 2 * 128 +
                                      (((row % 2 * 4 + chunk) ^ (row / 2 % 4 * 2)) << 4));
  }
};

// What a lane of a block of 128 keys and tiles of 64 queries does with the elements of pairs: its four
// keys, and queries 8 n + 2 (l % 4) + {0, 1} of a tile. The bias lies in_fours, keys come in fours.
template <class T>
class PairRows {
 public:
  static constexpr int n8 = 8;
  using Scores = float[2][n8][4];

  // `first_key`: the first of the lane's warp.
  __device__ PairRows(const ScoreParams& score, const Shape& shape, const KeyTile& tile,
                      int first_key)
      : score_(score),
        shape_(shape),
        tile_(tile),
        lane_(lane_id()),
        warp_key_(first_key),
        query_(lane_ % 4 * 2) {}

  // Loads the mask of a tile to come.
  __device__ void load(QueryPlace place) {
    if (place.masked) load_mask(place);
  }

  // Starts copies of the biases of a tile to a WarpBiasTile of the warp's own.
  __device__ void copy_bias(QueryPlace place, std::uint32_t to) const {
    if (!score_.bias.per_query) return;
    const int row = lane_ / 4;
    const int chunk = lane_ % 4;
    const std::int64_t step = 2 * score_.bias.query;
    const std::byte* const from =
        score_.bias.data + 2 * (bias_index(place) + warp_key_ + 8 * chunk) + row * step;
    to += WarpBiasTile::offset(row, chunk);
    const auto address = [&](int i) {
      return to + static_cast<std::uint32_t>(i * 8 * WarpBiasTile::row_bytes);
    };
    if (score_.bias.in_words && place.row + 8 * n8 <= shape_.seqlen_q &&
        warp_key_ + 32 <= shape_.seqlen_k) {
#pragma unroll
      for (int i = 0; i < n8; ++i) cp_async_16(address(i), from + 8 * i * step);
      return;
    }
    const int left = shape_.seqlen_k - warp_key_ - 8 * chunk;
#pragma unroll 1
    for (int i = 0; i < n8; ++i) {
      const bool exists = place.row + row + 8 * i < shape_.seqlen_q;
      const std::byte* const source = exists && left > 0 ? from + 8 * i * step : score_.bias.data;
      cp_async_8(address(i), source, exists && left > 0);
      cp_async_8(address(i) + 8, left > 4 ? source + 8 : source, exists && left > 4);
    }
  }

  // Until the copied biases are there.
  __device__ void wait() const {
    cp_async_wait_all();
    __syncwarp();
  }

  // x = scale x + bias (x without a bias of pairs), -inf where masked; the bias as copied to `bias`,
  // whose bytes are free afterwards.
  __device__ void apply(QueryPlace place, std::uint32_t bias, Scores& x) const {
    if (score_.bias.per_query) {
      wait();
      std::uint32_t least = 0;
#pragma unroll
      for (int n = 0; n < n8; ++n) add_bias(bias, n, x, least);
      if (warp_any(is_mask(least))) {
#pragma unroll
        for (int n = 0; n < n8; ++n) mask_by_bias(bias, n, x);
      }
      __syncwarp();
    }
    if (place.masked) {
#pragma unroll
      for (int n = 0; n < n8; ++n) mask(n, x);
    }
  }

  // The same of block n of columns, step by step; biases that are masks are only noticed. `least`: two
  // biases, for two keys of all, none of which is greater; begins as 0.
  __device__ void add_bias(std::uint32_t bias, int n, Scores& x, std::uint32_t& least) const {
    const float factor = score_.pair_factor;
    for_each_word(bias, n, x, [&](std::uint32_t word, float& low, float& high) {
      const Pair both =
          __hmin2_nan(reinterpret_cast<const Pair&>(least), reinterpret_cast<const Pair&>(word));
      least = reinterpret_cast<const std::uint32_t&>(both);
      const float2 of_key = Element<T>::widen_pair(word);
      low = fmaf(low, factor, of_key.x);
      high = fmaf(high, factor, of_key.y);
    });
  }

  // Rarely is a bias a mask, too.
  __device__ bool is_mask(std::uint32_t least) const {
    const Pair& both = reinterpret_cast<const Pair&>(least);
    const float mask_value = score_.mask_value;
    return !(Element<T>::widen(both.x) > mask_value && Element<T>::widen(both.y) > mask_value);
  }

  __device__ void mask(int n, Scores& x) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const std::uint32_t bits = shuffle(mask_[n / 4], 8 * (n % 4) + query_ + e) >> (lane_ / 4 * 4);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if ((bits >> (2 * m + h) & 1) == 0) x[m][n][2 * h + e] = negative_infinity;
        }
      }
    }
  }

 private:
  using Pair = typename Element<T>::Pair;

  __device__ std::int64_t bias_index(QueryPlace place) const {
    const Broadcast& bias = score_.bias;
    return tile_.batch * bias.batch + place.head * bias.head_q + tile_.kv_head * bias.head_kv +
           place.row * bias.query;
  }

  __device__ void mask_by_bias(std::uint32_t bias, int n, Scores& x) const {
    const float mask_value = score_.mask_value;
    for_each_word(bias, n, x, [&](std::uint32_t word, float& low, float& high) {
      const float2 of_key = Element<T>::widen_pair(word);
      if (!(of_key.x > mask_value)) low = negative_infinity;
      if (!(of_key.y > mask_value)) high = negative_infinity;
    });
  }

  // Calls body(the biases of two neighbouring keys, their scores) for block n of columns.
  template <class Body>
  __device__ void for_each_word(std::uint32_t bias, int n, Scores& x, const Body& body) const {
    const std::uint32_t from = bias + WarpBiasTile::offset(query_, lane_ / 8) + lane_ / 4 % 2 * 8;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint2 four = load_shared_8((from ^ static_cast<std::uint32_t>(64 * e)) +
                                       static_cast<std::uint32_t>(n * 8 * WarpBiasTile::row_bytes));
      body(four.x, x[0][n][e], x[0][n][2 + e]);
      body(four.y, x[1][n][e], x[1][n][2 + e]);
    }
  }

  // Row 0 of a tile in the first of the block's two words.
  __device__ const std::uint64_t* mask_tile(QueryPlace place) const {
    const PackedMask& mask = score_.packed_mask;
    const int row_tiles = (shape_.seqlen_q + PackedMask::side - 1) / PackedMask::side;
    const std::int64_t matrix =
        tile_.batch * mask.batch + place.head * mask.head_q + tile_.kv_head * mask.head_kv;
    const std::int64_t tile = (matrix * row_tiles + place.row / PackedMask::side) * mask.words +
                              tile_.key / PackedMask::side;
    return mask.bits + tile * PackedMask::side;
  }

  // A lane holds the bits of queries l and l + 32 and the warp's 32 keys.
  __device__ void load_mask(QueryPlace place) {
    const int word = (warp_key_ - tile_.key) / PackedMask::side;
    const auto* const from =
        reinterpret_cast<const std::uint32_t*>(mask_tile(place) + word * PackedMask::side + lane_) +
        warp_key_ / 32 % 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) mask_[i] = warp_key_ < shape_.seqlen_k ? __ldg(from + 64 * i) : 0;
  }

  const ScoreParams& score_;
  const Shape& shape_;
  KeyTile tile_;
  int lane_;
  int warp_key_;
  int query_;
  std::uint32_t mask_[2];
};

}  // namespace flash_dmattn::cuda::sm80
