#pragma once

#include "cuda/common/scheduler.cuh"
#include "cuda/common/score.cuh"
#include "cuda/sm80/score_tile.cuh"

// Masks and biases with a query dimension for kernels whose scores are transposed, [keys, queries].
namespace flash_dmattn::cuda::sm80 {

// Which key of a block a row of its scores holds: such that the rows of a lane's accumulators,
// 16 m + 8 h + l / 4 in each 32, are four neighbouring keys, 2 m + h the number of each.
struct FourByLane {
  static __device__ constexpr int key(int row) { return row / 32 * 32 + row % 8 * 4 + row / 8 % 4; }
};

// Query tile of a walk.
struct QueryPlace {
  int head;
  int row;
  bool masked;  // by the packed mask, somewhere
};

// The tiles of `rows` queries that a block of 128 keys visits: those of one head after those of the
// other.
class EveryQueryTile {
 public:
  __device__ EveryQueryTile(int first_head, int heads, int begin, int end, int rows)
      : heads_end_(first_head + heads),
        begin_(begin),
        end_(end),
        rows_(rows),
        place_{end > begin ? first_head : heads_end_, begin, false} {}

  __device__ bool has() const { return place_.head < heads_end_; }
  __device__ int number() const { return 0; }  // it passes no tile
  __device__ QueryPlace place() const { return place_; }
  __device__ void advance() {
    place_.row += rows_;
    if (place_.row >= end_) place_ = {place_.head + 1, begin_, false};
  }

 private:
  int heads_end_;
  int begin_;
  int end_;
  int rows_;
  QueryPlace place_;
};

// Those that the packed mask does not leave empty; all heads' tiles of the same queries one after
// the other, so that their gradients of a bias they share can be summed. Tiles are numbered
// row / 64 * heads + head.
class MaskedQueryTiles {
 public:
  static constexpr int rows = PackedMask::side;

  // Of queries [begin, end).
  __device__ MaskedQueryTiles(const PackedMask& mask, const KeyTile& tile, int seqlen_q,
                              int first_head, int heads, int begin, int end)
      : mask_(mask),
        tile_(tile),
        row_tiles_((seqlen_q + rows - 1) / rows),
        first_head_(first_head),
        heads_(heads),
        end_(end > begin ? (end + rows - 1) / rows * heads : 0),
        all_tiles_(row_tiles_ * heads) {
    move_to(find(end > begin ? begin / rows * heads : 0));
  }

  __device__ bool has() const { return number_ < end_; }
  // After the last one, the number of all tiles.
  __device__ int number() const { return number_; }
  __device__ QueryPlace place() const {
    return {first_head_ + member_, row_,
            mask_.states != nullptr && (all_ >> (number_ % 32) & 1) == 0};
  }
  __device__ void advance() { move_to(find(number_ + 1)); }

 private:
  // Mostly to the next one, without a division.
  __device__ void move_to(int number) {
    const int step = number - number_;
    number_ = number;
    member_ += step;
    if (member_ >= 2 * heads_) {
      row_ += member_ / heads_ * rows;
      member_ %= heads_;
    } else if (member_ >= heads_) {
      row_ += rows;
      member_ -= heads_;
    }
  }

  // The first tile from `number` on that is not empty.
  __device__ int find(int number) {
    for (; number < end_; number = (number / 32 + 1) * 32) {
      if (number / 32 != window_) load(number / 32);
      const std::uint32_t left = some_ >> (number % 32);
      if (left != 0) return number + __ffs(static_cast<int>(left)) - 1;
    }
    return all_tiles_;
  }

  // The states of 32 tiles, one for each lane.
  __device__ void load(int window) {
    window_ = window;
    const int number = window * 32 + static_cast<int>(threadIdx.x) % 32;
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
    some_ = __ballot_sync(0xffffffffu, some != 0);
    all_ = __ballot_sync(0xffffffffu, all != 0);
  }

  const PackedMask& mask_;
  KeyTile tile_;
  int row_tiles_;
  int first_head_;
  int heads_;
  int end_;
  int all_tiles_;
  int window_ = -1;
  std::uint32_t some_ = 0;
  std::uint32_t all_ = 0;
  int number_ = 0;
  int member_ = 0;  // number_ % heads_
  int row_ = 0;     // number_ / heads_ * rows
};

// What a lane of a block of 128 keys and tiles of 64 queries does with the elements of pairs: its four
// keys, and queries 8 n + 2 (l % 4) + {0, 1} of a tile. The bias lies in_fours, keys come in fours.
template <class T, int D>
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
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_key_(first_key),
        key_(first_key + lane_ / 4 * 4),
        query_(lane_ % 4 * 2) {}

  // Has the elements of a tile brought to the L2, a tile ahead; by 128 threads, two for each query.
  __device__ void prefetch(QueryPlace place) const {
    const int row = static_cast<int>(threadIdx.x) % 128 / 2;
    const int key = tile_.key + static_cast<int>(threadIdx.x) % 2 * 64;
    if (place.row + row >= shape_.seqlen_q || key >= shape_.seqlen_k) return;
    if (score_.bias.per_query) {
      prefetch_l2(score_.bias.data + 2 * (bias_index(place) + row * score_.bias.query + key));
    }
    if (place.masked && key == tile_.key) {
      prefetch_l2(score_.packed_mask.bits + mask_row(place, row) + key / PackedMask::side);
    }
  }

  // Loads what apply() will want.
  __device__ void load(QueryPlace place) {
    if (place.masked) load_mask(place);
    if (batches == 1 && score_.bias.per_query) load_bias(place, 0);
  }

  // x = scale x + bias (x without a bias of pairs), -inf where masked.
  __device__ void apply(QueryPlace place, Scores& x) {
    if (score_.bias.per_query) {
#pragma unroll
      for (int batch = 0; batch < batches; ++batch) {
        if constexpr (batches > 1) load_bias(place, batch);
        add_bias(batch, x);
      }
    }
    if (place.masked) mask(x);
  }

 private:
  // Beside the accumulators of 128 columns there are registers for half of a tile's bias only. Then
  // it is loaded when it is due, out of the L2.
  static constexpr int batches = D <= 64 ? 1 : 2;
  static constexpr int batch_n8 = n8 / batches;

  __device__ std::int64_t bias_index(QueryPlace place) const {
    const Broadcast& bias = score_.bias;
    return tile_.batch * bias.batch + place.head * bias.head_q + tile_.kv_head * bias.head_kv +
           place.row * bias.query;
  }

  // Instead of what does not exist something else is read; no key sees those queries, no query
  // those keys.
  __device__ void load_bias(QueryPlace place, int batch) {
    const int first = min(query_ + 8 * batch * batch_n8, shape_.seqlen_q - 1 - place.row);
    const int left = shape_.seqlen_q - place.row - first;
    const int step = static_cast<int>(2 * score_.bias.query);
    const std::byte* const from = score_.bias.data +
                                  2 * (bias_index(place) + min(key_, shape_.seqlen_k - 4)) +
                                  static_cast<std::int64_t>(first) * step;
#pragma unroll
    for (int n = 0; n < batch_n8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int query = 8 * n + e < left ? 8 * n + e : 0;
        bias_[n][e] =
            __ldg(reinterpret_cast<const uint2*>(from + static_cast<std::int64_t>(query) * step));
      }
    }
  }

  __device__ void add_bias(int batch, Scores& x) const {
    using Pair = typename Element<T>::Pair;
    const float factor = score_.pair_factor;
    const float mask_value = score_.mask_value;
    Pair least = pair_of(bias_[0][0].x);
    for_each_word(batch, x, [&](Pair bias, float& low, float& high) {
      least = __hmin2_nan(least, bias);
      low = fmaf(low, factor, Element<T>::widen(bias.x));
      high = fmaf(high, factor, Element<T>::widen(bias.y));
    });
    // Rarely is a bias a mask, too.
    if (Element<T>::widen(least.x) > mask_value && Element<T>::widen(least.y) > mask_value) return;
    for_each_word(batch, x, [&](Pair bias, float& low, float& high) {
      if (!(Element<T>::widen(bias.x) > mask_value)) low = negative_infinity;
      if (!(Element<T>::widen(bias.y) > mask_value)) high = negative_infinity;
    });
  }

  static __device__ typename Element<T>::Pair pair_of(std::uint32_t word) {
    return reinterpret_cast<const typename Element<T>::Pair&>(word);
  }

  // Calls body(the biases of two neighbouring keys, their scores).
  template <class Body>
  __device__ void for_each_word(int batch, Scores& x, const Body& body) const {
#pragma unroll
    for (int n = 0; n < batch_n8; ++n) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float (&s)[4] = x[m][batch * batch_n8 + n];
          body(pair_of(m == 0 ? bias_[n][e].x : bias_[n][e].y), s[e], s[2 + e]);
        }
      }
    }
  }

  // The word at which row `row` of a tile begins.
  __device__ std::int64_t mask_row(QueryPlace place, int row) const {
    const PackedMask& mask = score_.packed_mask;
    const std::int64_t matrix =
        tile_.batch * mask.batch + place.head * mask.head_q + tile_.kv_head * mask.head_kv;
    return (matrix * shape_.seqlen_q + place.row + row) * mask.words;
  }

  // A lane holds the bits of queries l and l + 32 and the warp's 32 keys.
  __device__ void load_mask(QueryPlace place) {
    const auto* const from =
        reinterpret_cast<const std::uint32_t*>(score_.packed_mask.bits + mask_row(place, lane_));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool exists =
          place.row + lane_ + 32 * i < shape_.seqlen_q && warp_key_ < shape_.seqlen_k;
      mask_[i] = exists ? __ldg(from + 64 * i * score_.packed_mask.words + warp_key_ / 32) : 0;
    }
  }

  __device__ void mask(Scores& x) const {
#pragma unroll
    for (int n = 0; n < n8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const std::uint32_t bits =
            __shfl_sync(0xffffffffu, mask_[n / 4], 8 * (n % 4) + query_ + e) >> (lane_ / 4 * 4);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if ((bits >> (2 * m + h) & 1) == 0) x[m][n][2 * h + e] = negative_infinity;
          }
        }
      }
    }
  }

  const ScoreParams& score_;
  const Shape& shape_;
  KeyTile tile_;
  int lane_;
  int warp_key_;
  int key_;
  int query_;
  uint2 bias_[batch_n8][2];
  std::uint32_t mask_[2];
};

}  // namespace flash_dmattn::cuda::sm80
