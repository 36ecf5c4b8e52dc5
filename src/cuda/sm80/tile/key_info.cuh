#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/score.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/primitives/integers.h"
#include "cuda/primitives/math.cuh"
#include "cuda/primitives/warp.cuh"

// Key info consists of a key's bias and the queries that see the key, by key mask, mask value of the bias, interval,
// causality and the end of the sequence. It is loaded once per key tile. A tile whose keys are all seen by every row
// needs no element tests.
namespace flash_dmattn::cuda {

// A larger bias of a key counts as this one, which is finite in units of log 2.
inline constexpr float largest_key_bias = 2.0e38f;

// Queries [first, first + length) see a key.
struct QueryRange {
  int first;
  int length;

  __device__ bool sees(int row) const {
    return static_cast<unsigned>(row - first) < static_cast<unsigned>(length);
  }
};

// The key info of a tile in shared memory, by column of the scores.
template <int N>
struct KeyInfoTile {
  static constexpr int size = N;
  static constexpr std::uint32_t touched = 1;  // some key is seen by some row of the query tile
  static constexpr std::uint32_t partial = 2;  // some key is not seen by every row
  static constexpr std::uint32_t far = 4;      // some touched key's bias is beyond ± far_bias

  alignas(16) QueryRange range[N];
  // The caller's bias; a delayed bias that masks is -inf, and hides its key from the queries for which it counts.
  alignas(16) float bias[N];
  std::uint32_t state[ceil_div(N, warp_size)];  // for each 32 columns

  // Called by all lanes of a warp, which have columns [32 (column / 32), + 32), after each has stored its bias.
  __device__ void store_state(int column, bool is_touched, bool is_full) {
    const bool any_touched = warp_any(is_touched);
    const bool any_partial = warp_any(!is_full);
    const float own = bias[column];  // -inf masks
    const bool any_far = warp_any(is_touched && fabsf(own) > far_bias && own > negative_infinity);
    if (column % warp_size == 0) {
      state[column / warp_size] =
          (any_touched ? touched : 0u) | (any_partial ? partial : 0u) | (any_far ? far : 0u);
    }
  }

  __device__ std::uint32_t tile_state() const {
    std::uint32_t all = state[0];
#pragma unroll
    for (int i = 1; i < ceil_div(N, warp_size); ++i) all |= state[i];
    return all;
  }
};

// Loads the info of one key in two steps, between which the loads are in flight. Addresses are recomputed at each load,
// because the main loops have no registers for them.
template <class T>
class KeyInfoLoader {
 public:
  __device__ KeyInfoLoader(const ScoreParams& score, const Shape& shape, int batch, int head,
                           int kv_head)
      : score_(score), shape_(shape), batch_(batch), head_(head), kv_head_(kv_head) {}

  // Whether keys have a mask or a bias, in addition to position and interval.
  __device__ bool has_values() const { return has_mask() || has_bias(); }

  // A key whose loads are in flight.
  struct Key {
    int key = 0;
    KeyInterval interval{0, 0};
    float bias = 0;
    bool allowed = false;
  };

  __device__ void load(int key, bool valid) { key_ = read(key, valid); }
  __device__ Key read(int key, bool valid) const {
    Key result{key, {0, shape_.seqlen_q}, 0, valid};
    if (!valid) return result;
    if (score_.intervals.data != nullptr) {
      const KeyInterval* intervals = score_.intervals.data +
                                     batch_ * score_.intervals.stride_batch +
                                     kv_head_ * score_.intervals.stride_head;
      const int2 interval = __ldg(reinterpret_cast<const int2*>(intervals) + key);
      result.interval = {interval.x, interval.y};
    }
    if (has_mask()) {
      result.allowed = __ldg(reinterpret_cast<const std::uint8_t*>(score_.mask.data) +
                             index_of(score_.mask, key)) != 0;
    }
    if (has_bias()) result.bias = load_bias<T>(score_.bias, index_of(score_.bias, key));
    return result;
  }

  // Called by all lanes of a warp, which hold columns [32 (column / 32), + 32).
  template <int N>
  __device__ void store(KeyInfoTile<N>& tile, int column, int row_begin, int row_end) const {
    store(key_, tile, column, row_begin, row_end);
  }
  template <int N>
  __device__ void store(const Key& key, KeyInfoTile<N>& tile, int column, int row_begin,
                        int row_end) const {
    const int shift = shape_.seqlen_k - shape_.seqlen_q;
    const int first = max(key.interval.first, score_.causal ? max(key.key - shift, 0) : 0);
    const bool masks = has_bias() && !(key.bias > score_.mask_value);
    const bool visible = key.allowed && !(masks && score_.bias_delay == 0);
    // The end of an interval may be any int32, so the difference is formed after the comparison.
    const int last = max(min(key.interval.last, shape_.seqlen_q), first);
    const int length = visible ? last - first : 0;
    tile.range[column] = {first, length};
    // The bias stays finite, so that a key that no row sees cannot make a NaN.
    tile.bias[column] = !visible ? 0.0f
                        : masks  ? negative_infinity
                                 : fminf(key.bias, largest_key_bias);
    const bool touched = first < row_end && first + length > row_begin && length > 0;
    const bool full = first <= row_begin && first + length >= row_end;
    tile.store_state(column, touched, full);
  }

 private:
  __device__ bool has_mask() const { return score_.mask.data != nullptr && !score_.mask.dense; }
  __device__ bool has_bias() const { return score_.bias.data != nullptr && !score_.bias.dense; }

  __device__ std::int64_t index_of(const Broadcast& b, int key) const {
    return b.begin(batch_, head_, kv_head_) + key * b.key;
  }

  const ScoreParams& score_;
  const Shape& shape_;
  int batch_;
  int head_;
  int kv_head_;

  Key key_;
};

}  // namespace flash_dmattn::cuda
