#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_dmattn/visibility.h"
#include "selection/query_tile_lists.h"

// Parameters of the kernels. They are plain values, and all pointers point to device memory.
namespace flash_dmattn::cuda {

// The rows of a [B, S, H, D] tensor of 16-bit elements. `Byte` is const for rows that are only read. Strides are in
// bytes.
template <class Byte>
struct RowsView {
  Byte* data = nullptr;
  std::int64_t batch = 0;
  std::int64_t row = 0;
  std::int64_t head = 0;
  bool aligned = false;  // every row begins at a multiple of 16 bytes, and `row` fits into:
  int row_step = 0;      // `row`, so that an address is one multiply-add
};
using InputRows = RowsView<const std::byte>;
using OutputRows = RowsView<std::byte>;

// A mask or a bias, ({B|1}, {Hq|Hkv|1}, {Sq|1}, {Sk|1}). Strides are in elements, 0 for a broadcast dimension. The
// head's stride is split in two, one of which is 0, so that kernels need no branch on the kind of head.
template <class Byte>
struct BroadcastView {
  Byte* data = nullptr;
  std::int64_t batch = 0;
  std::int64_t head_q = 0;
  std::int64_t head_kv = 0;
  std::int64_t query = 0;
  std::int64_t key = 0;
  bool dense = false;        // has a query dimension
  bool aligned_x2 = false;   // elements 2 i and 2 i + 1 of every row are in one aligned word
  bool aligned_x4 = false;   // so are elements 4 i ... 4 i + 3; `query` fits into 31 bits
  bool aligned_16B = false;  // so are the elements of every 16 bytes (16-bit elements or bytes)
  bool f32 = false;          // a bias has fp32 instead of 16-bit elements

  // The first element of a head.
  constexpr std::int64_t begin(int batch_index, int head, int kv_head) const {
    return batch_index * batch + head * head_q + kv_head * head_kv;
  }
};
using Broadcast = BroadcastView<const std::byte>;
using OutputBroadcast = BroadcastView<std::byte>;

// A mask with a query dimension, which PackMaskKernel (common/packed_mask.cuh) packs to a bit for each element, with a
// state for each tile of 64 x 64 elements. With ranks, only elements that the ranks select have their bit set. Matrices
// are [B|1, H|1]; their strides count matrices, and the head's stride is split as in Broadcast.
struct PackedMask {
  static constexpr int side = 64;
  static constexpr int shared_row_tiles = 3;  // most row tiles of a kernel's work tile
  static constexpr std::uint8_t some = 1;     // some element of the tile is visible
  static constexpr std::uint8_t all = 2;      // every existing element is visible

  // [matrices, ceil(Sq / 64), words, 64 queries]: bit j of word w is key 64 w + j. If it is null and there are states,
  // the kernel reads the mask's bytes, and FindMaskStates (common/mask_states.cuh) finds the tiles with some visible
  // element.
  std::uint64_t* bits = nullptr;
  std::uint8_t* states = nullptr;  // [matrices, ceil(Sq / 64), words]
  int words = 0;                   // ceil(Sk / 64)
  int batch = 0;
  int head_q = 0;
  int head_kv = 0;

  constexpr std::int64_t matrix(int batch_index, int head, int kv_head) const {
    return batch_index * batch + head * head_q + kv_head * head_kv;
  }
};

// The number of queries of a tile of key lists and of key ranges. The rows of a kernel's tile divide it, except for
// some kernels with dense masks, which have no lists.
inline constexpr int query_tile_rows = 128;

// The keys that a tile of query_tile_rows queries visits if there are key intervals and no list: from the first to
// the last key that any query sees (common/key_ranges.cuh). Bounds are multiples of `keys` or the end of the
// sequence.
struct alignas(16) KeyRange {
  static constexpr int keys = 64;

  int begin, end;
  int full_begin,
      full_end;  // keys among these that every query sees, unless a mask or a bias hides them
};

struct KeyRanges {
  const KeyRange* data = nullptr;  // [batch, heads, tiles]
  int batch = 0;                   // strides, in ranges
  int head = 0;
};

// The form of a score before the bias is added, x = q . k.
enum class ScoreForm : std::uint8_t {
  product,            // s = factor x
  nonpositive_scale,  // x is multiplied by `inner` first, as only a positive factor may follow the max
  capped,             // x becomes tanh(x scale / c) first
};

// Scores are in units of log 2, so that exp is a single ex2. All factors include log2 e unless stated otherwise.
struct ScoreParams {
  ScoreForm form = ScoreForm::product;
  float inner = 0;             // nonpositive_scale: scale log2 e; capped: 2 log2 e scale / c
  float factor = 0;            // > 0: scale log2 e, 1 or c log2 e
  float dense_factor = 0;      // `factor` without log2 e, for a dense bias, which is added unscaled
  float final_log2_scale = 0;  // multiplies a finished score: factor without a bias
  float mask_value = 0;        // biases at or below it mask
  Broadcast mask;
  Broadcast key_rank;      // int32; with ranks the mask counts as dense
  Broadcast rank_limit;    // int32
  PackedMask packed_mask;  // the dense mask and the ranks, if there are no tile lists
  Broadcast bias;
  KeyIntervals intervals;
  bool causal = false;
  // These are for the fp64 fallback, which computes in natural units.
  float scale = 0;
  float softcap = 0;
};

struct Shape {
  int batch = 0;
  int heads_q = 0;
  int heads_kv = 0;
  int seqlen_q = 0;
  int seqlen_k = 0;
  int head_dim = 0;
};

struct ForwardParams {
  Shape shape;
  ScoreParams score;
  InputRows q, k, v;
  OutputRows out;
  QueryTileLists tile_lists;  // empty where there are no lists
  KeyRanges key_ranges;       // for calls without lists; empty: every key is visited
  float* lse = nullptr;
  float* lse_low = nullptr;  // may be null
  bool saturate = true;
};

// The memory of blocks that add in a fixed order (common/semaphore.cuh). Null pointers mean any order.
struct OrderSemaphores {
  int* started = nullptr;     // [1] number of blocks that have started
  int* published = nullptr;   // [blocks] the order index up to which each block is done
  bool across_heads = false;  // blocks of other kv heads add to a query's elements too
};

// Conditions that the preprocess finds in some row, or that a main loop finds. Each enables a slow path.
enum BackwardFlag : std::uint32_t {
  dout_not_finite = 1,
  lse_has_low = 2,     // lse_log2_low is significant
  lse_is_extreme = 4,  // scores may have overflowed
  dq_not_finite = 8,   // before it was converted (common/dq_fixup.cuh)
  q_not_finite = 16,   // without `saturate`
  row_not_finite =
      32,  // without `saturate`: P or dS of a row that sees a key (common/nonfinite_rows.cuh)
};

// The parameters of every kernel of a backward; a main loop's parameters derive from them.
struct BackwardParams {
  Shape shape;
  ScoreParams score;
  InputRows q, k, v, out, dout;
  OutputRows dq, dk, dv;
  QueryTileLists tile_lists;  // the keys that a row may see; all keys if it is empty
  const float* lse = nullptr;
  const float* lse_low = nullptr;  // may be null
  OutputBroadcast dbias;           // receives ds, stored or added in fp32; null if not wanted
  bool dbias_accumulates =
      false;  // elements of ds that share an element of dbias are added in fp32
  bool saturate = true;

  // Workspace.
  float* lse_log2 = nullptr;       // [B, Hq, Sq] lse log2 e, +inf for a row without visible keys
  float* lse_log2_low = nullptr;   // [B, Hq, Sq] rounding error of lse_log2
  float* delta = nullptr;          // [B, Hq, Sq]
  std::uint32_t* flags = nullptr;  // [1] BackwardFlag
};

}  // namespace flash_dmattn::cuda
