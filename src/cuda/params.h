#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_dmattn/visibility.h"
#include "selection/query_tile_lists.h"

// Parameters of the kernels: plain values, all pointers to device memory.
namespace flash_dmattn::cuda {

// The rows of a [B, S, H, D] tensor of 16-bit elements: `Byte` is const where they are read. Strides in
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

// A mask or a bias, ({B|1}, {Hq|Hkv|1}, {Sq|1}, {Sk|1}). Strides in elements, 0 where it
// broadcasts; the head's is split in two, one of which is 0, so that kernels need no branch on the
// kind of head.
template <class Byte>
struct BroadcastView {
  Byte* data = nullptr;
  std::int64_t batch = 0;
  std::int64_t head_q = 0;
  std::int64_t head_kv = 0;
  std::int64_t query = 0;
  std::int64_t key = 0;
  bool dense = false;        // has a query dimension
  bool aligned_x2 = false;   // elements 2 i and 2 i + 1 of every row lie in one aligned word
  bool aligned_x4 = false;   // elements 4 i ... 4 i + 3 of every row do; `query` fits into 31 bits
  bool aligned_16B = false;  // as many as 16 bytes have do, of 16-bit elements or bytes
  bool f32 = false;          // of a bias: fp32 elements, else 16-bit ones

  // The first element of a head.
  constexpr std::int64_t begin(int batch_index, int head, int kv_head) const {
    return batch_index * batch + head * head_q + kv_head * head_kv;
  }
};
using Broadcast = BroadcastView<const std::byte>;
using OutputBroadcast = BroadcastView<std::byte>;

// A mask with a query dimension, packed by PackMaskKernel (common/packed_mask.cuh) to a bit for each
// element (where there are ranks, of the elements that they choose), with a state for each tile of 64 x 64
// elements. Matrices are [B|1, H|1]; their strides count matrices, the head's split as in Broadcast.
struct PackedMask {
  static constexpr int side = 64;
  static constexpr int shared_row_tiles = 3;  // at most, of a kernel's work tile
  static constexpr std::uint8_t some = 1;     // some element of the tile is visible
  static constexpr std::uint8_t all = 2;      // every one that exists is

  // [matrices, ceil(Sq / 64), words, 64 queries]: bit j of word w is key 64 w + j. Null, with states: the kernel reads
  // the mask's bytes, and FindMaskStates (common/mask_states.cuh) finds the tiles with some visible element.
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

// Queries of a tile of key lists and of key ranges. The rows of every kernel's tile divide it, but for some with dense
// masks, which have no lists.
inline constexpr int query_tile_rows = 128;

// The keys that a tile of query_tile_rows queries visits where there are key intervals and no list: between
// the first and the last that any query sees (common/key_ranges.cuh). All are multiples of `keys`, but for the
// end of the sequence.
struct alignas(16) KeyRange {
  static constexpr int keys = 64;

  int begin, end;
  int full_begin,
      full_end;  // of these, keys that every query sees, unless a mask or a bias hides them
};

struct KeyRanges {
  const KeyRange* data = nullptr;  // [batch, heads, tiles]
  int batch = 0;                   // strides in ranges
  int head = 0;
};

// The form of a score before the bias is added, x = q . k.
enum class ScoreForm : std::uint8_t {
  product,  // s = factor x
  nonpositive_scale,  // x is multiplied by `inner` first: a factor that is not positive may not follow the max
  capped,             // x becomes tanh(x scale / c) first
};

// Scores are kept in units of log 2, so that exp is a single ex2: log2 e is inside all of these.
struct ScoreParams {
  ScoreForm form = ScoreForm::product;
  float inner = 0;             // nonpositive_scale: scale log2 e; capped: 2 log2 e scale / c
  float factor = 0;            // > 0: scale log2 e, 1 or c log2 e
  float dense_factor = 0;      // the same without log2 e, for a dense bias, which is added as it is
  float final_log2_scale = 0;  // multiplies a finished score: factor without a bias
  float mask_value = 0;        // of a bias
  Broadcast mask;
  Broadcast key_rank;      // int32; with it the mask counts as one with a query dimension
  Broadcast rank_limit;    // int32
  PackedMask packed_mask;  // of a dense mask and the ranks, where there are no tile lists
  Broadcast bias;
  KeyIntervals intervals;
  bool causal = false;
  // For the fp64 fallback, which computes in natural units.
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

// Of blocks that add to memory in a fixed order (common/semaphore.cuh). Null: in any order.
struct OrderSemaphores {
  int* started = nullptr;     // [1] blocks so far
  int* published = nullptr;   // [blocks] up to which order index each is done
  bool across_heads = false;  // blocks of other kv heads add to a query's elements too
};

// Found by the preprocess in some row, or by a main loop. Each enables a slow path.
enum BackwardFlag : std::uint32_t {
  dout_not_finite = 1,
  lse_has_low = 2,     // lse_log2_low matters
  lse_is_extreme = 4,  // scores may have overflowed
  dq_not_finite = 8,   // before it was converted (common/dq_fixup.cuh)
  q_not_finite = 16,   // without `saturate`
  row_not_finite =
      32,  // without `saturate`: P or dS of a row that sees a key (common/nonfinite_rows.cuh)
};

// Common to every kernel of a backward; a main loop's own parameters derive from it.
struct BackwardParams {
  Shape shape;
  ScoreParams score;
  InputRows q, k, v, out, dout;
  OutputRows dq, dk, dv;
  QueryTileLists tile_lists;  // the keys that a row may see; without keys: all
  const float* lse = nullptr;
  const float* lse_low = nullptr;  // may be null
  OutputBroadcast dbias;           // where ds is stored or added in fp32; null data: not wanted
  bool dbias_accumulates = false;  // several elements of ds share one of dbias: add, in fp32
  bool saturate = true;

  // Workspace.
  float* lse_log2 = nullptr;       // [B, Hq, Sq] lse log2 e, +inf for a row that sees nothing
  float* lse_log2_low = nullptr;   // [B, Hq, Sq] what rounding took from lse_log2
  float* delta = nullptr;          // [B, Hq, Sq]
  std::uint32_t* flags = nullptr;  // [1] BackwardFlag
};

}  // namespace flash_dmattn::cuda
