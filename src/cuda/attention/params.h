#pragma once

#include <cstddef>
#include <cstdint>

#include "common/query_tile_lists.h"
#include "cuda/primitives/semaphore.h"
#include "cuda/primitives/views.h"
#include "flash_dmattn/visibility.h"

// Parameters of the kernels. They are plain values, and all pointers point to device memory.
namespace flash_dmattn::cuda {

// A mask with a query dimension, which PackMaskKernel (stages/packed_mask.cuh) packs to a bit for each element, with a
// state for each tile of 64 x 64 elements. Matrices are [B|1, H|1]; their strides count matrices, and the head's stride
// is split as in Broadcast.
struct PackedMask {
  static constexpr int side = 64;
  static constexpr int shared_row_tiles = 3;  // most row tiles of a kernel's work tile
  static constexpr std::uint8_t some = 1;     // some element of the tile is visible
  static constexpr std::uint8_t all = 2;      // every existing element is visible

  // [matrices, ceil(Sq / 64), words, 64 queries]: bit j of word w is key 64 w + j. If it is null and there are states,
  // the kernel reads the mask's bytes, and FindMaskStates (stages/mask_states.cuh) finds the tiles with some visible
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

// The queries of one query tile list and of one key range. The rows of a kernel's tile divide it, except for some kernels
// with dense masks, which have no lists.
inline constexpr int query_tile_rows = 128;

// The keys that a tile of query_tile_rows queries visits if there are key intervals and no list: from the first to
// the last key that any query sees (stages/key_ranges.cuh). Bounds are multiples of `keys` or the end of the
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
  PackedMask packed_mask;  // the dense mask, if there are no tile lists
  Broadcast bias;
  KeyIntervals intervals;
  bool causal = false;
  int bias_delay = 0;  // Problem::bias_delay, at most seqlen_k
  // These are for rows that are recomputed, in natural units.
  float scale = 0;
  float softcap = 0;
};

struct Shape {
  int batch = 0;
  int heads_q = 0;
  int heads_kv = 0;
  int seqlen_q = 0;
  int seqlen_k = 0;
  int head_dim = 0;   // of q and k
  int value_dim = 0;  // of v and out, at most head_dim

  // The number of query heads that share a kv head.
  __host__ __device__ int group_heads() const { return heads_q / heads_kv; }
  // A row of k and one of v.
  __host__ __device__ std::int64_t key_bytes() const { return 2 * (head_dim + value_dim); }
};

// The first query for which the delayed bias of a key counts; it may be before the first or after the last query.
inline __host__ __device__ int delayed_bias_begin(const ScoreParams& score, const Shape& shape,
                                                  int key) {
  return key + score.bias_delay - (shape.seqlen_k - shape.seqlen_q);
}

// Whether the bias of a key counts for a query.
inline __host__ __device__ bool has_bias(const ScoreParams& score, const Shape& shape, int query,
                                         int key) {
  return score.bias.data != nullptr &&
         (score.bias_delay == 0 || query >= delayed_bias_begin(score, shape, key));
}

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

// Conditions that the preprocess finds in some row, or that a main loop finds. Each enables a slow path.
enum BackwardFlag : std::uint32_t {
  dout_not_finite = 1,
  lse_is_large = 2,   // one float does not hold some row's lse to the precision of P
  dq_not_finite = 4,  // before it was converted (stages/dq_fixup.cuh)
  q_not_finite = 8,   // without `saturate`
  row_not_finite =
      16,  // without `saturate`: P or dS of a row that sees a key (stages/nonfinite_rows.cuh)
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
  const float* dlse = nullptr;     // may be null
  OutputBroadcast dbias;           // receives ds, stored or added in fp32; null if not wanted
  bool dbias_accumulates =
      false;  // elements of ds that share an element of dbias are added in fp32
  bool saturate = true;

  // Workspace.
  // [B, Hq, Sq] lse log2 e, +inf for a row without P, and what rounding it to a float leaves; null if not wanted
  float* lse_log2 = nullptr;
  float* lse_log2_low = nullptr;
  float* delta = nullptr;          // [B, Hq, Sq] dout . out - dlse
  std::uint32_t* flags = nullptr;  // [1] BackwardFlag
};

}  // namespace flash_dmattn::cuda
