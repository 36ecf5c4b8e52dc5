#pragma once

#include <cstdint>

#include "common/query_tile_lists.h"
#include "flash_dmattn/types.h"
#include "flash_dmattn/visibility.h"

// The tasks that backend.cpp passes to the kernels of an instruction set: plain data, resolved once, so
// that no inline function of another header is compiled with the flags of an instruction set.
namespace flash_dmattn::cpu {

// Keys of a block: one step of the loop over keys. A multiple of the strip and panel sizes of every
// instruction set (12, 32, 6 rows; 32, 16, 8 columns), so that only a list's last block has tails.
inline constexpr int block_keys = 192;

// [B, S, H, D], D contiguous; strides in elements.
struct Rows {
  void* data = nullptr;
  std::int64_t batch = 0;
  std::int64_t row = 0;
  std::int64_t head = 0;
};

// A mask, a bias or its gradient. Strides in elements, 0 where it broadcasts.
struct Term {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t batch = 0;
  std::int64_t kv_head = 0;     // from one group of query heads to the next
  std::int64_t group_head = 0;  // within a group
  std::int64_t query = 0;
  std::int64_t key = 0;
};

// Slots of a KV cache as keys: in each (batch, kv head) those of [0, count) that are not empty. Arrays have R rows.
struct Slots {
  SlotCount* counts = nullptr;              // [R, Hkv]
  const float* scores = nullptr;            // [R, slots of all heads]
  const std::int32_t* positions = nullptr;  // the same, entries of kv_cache.h
  const std::int32_t* seen = nullptr;       // [R]
  std::int64_t delay = 0;                   // the number of tokens after which a key competes
  // The slots of head h begin at h * stride if all heads have equally many. Otherwise a head has more_slots more of them
  // than its entry in `windows`, the stride is 0, and this also holds for k, v and a bias.
  std::int64_t stride = 0;
  const std::int64_t* windows = nullptr;
  std::int64_t more_slots = 0;
  // [B]: the row of each in the batch, negative for none; null: b.
  const std::int32_t* rows = nullptr;
  std::int64_t rows_stride = 1;
  // Distances from one row to the next, in elements.
  std::int64_t row_slots = 0;
  std::int64_t row_counts = 0;
  std::int64_t row_seen = 0;
};

// Both directions. G = heads_q / heads_kv query heads share a kv head; a tile is tile_queries queries
// of all of them, stacked into rows: row r is query r / G, head r % G of the group.
struct Task {
  std::int64_t batch, heads_kv, group, seqlen_q, seqlen_k;
  int head_dim;
  int value_dim;        // of v and out, at most head_dim
  int head_dim_padded;  // columns of fp32 rows in the workspace: a multiple of 16
  DType dtype;
  float scale, softcap;
  float mask_value;
  std::int64_t bias_delay;  // Problem::bias_delay
  bool causal, saturate;

  Rows q, k, v;
  Term mask, bias;
  KeyIntervals intervals;
  Slots slots;                // few queries only
  QueryTileLists tile_lists;  // begin is null without intervals
  int tile_queries;
  std::int64_t tiles;
  // The forward runs few_queries.h, and the backward adds q . k in the same order.
  bool few_queries;

  // Without intervals: k and v of all blocks in the layouts of products, [B, Hkv, blocks of keys] of
  // packed_block_bytes. Null: every tile packs the keys that it sees.
  char* packed_keys;
  std::int64_t packed_block_bytes;

  std::int64_t key_blocks() const { return (seqlen_k + block_keys - 1) / block_keys; }
};

struct ForwardTask : Task {
  Rows out;
  float* lse;      // [B, Hq, Sq]
  float* lse_low;  // the same, may be null

  // Few queries: the number of splits of each tile's keys, and their sums [B, Hkv, tiles, splits] of split_bytes
  // each. 0: not split.
  int splits;
  char* split_sums;
  std::int64_t split_bytes;
};

enum class DbiasKind : std::uint8_t {
  none,
  per_key,       // no query dimension, or a delay: column sums per unit and head
  per_query,     // no key dimension: row sums
  dense,         // written from ds, every element by the one kv head that owns it
  dense_shared,  // dense, but shared by kv heads or batch elements (kernels/shared_dbias.h)
};

// Where gradients saturate. In bf16 that is at half of the largest number, so that a sum of two is still finite.
constexpr float gradient_limit(DType dtype) {
  switch (dtype) {
    case DType::bf16: return 0x1.fep126f;
    case DType::f16: return 65504;
    default: return 0x1.fffffep127f;
  }
}

// The consecutive tiles that one worker computes with its own dk and dv accumulators.
inline constexpr int max_segments = 16;
inline constexpr int max_head_dim = 256;

// A unit is (segment, b, kv head): unit = (segment * B + b) * Hkv + h. It adds dk and dv into rows of
// its own, one row ("slot") per key that it can see.
struct BackwardTask : Task {
  Rows out, dout;
  const float* lse;
  const float* lse_low;  // may be null
  const float* dlse;     // may be null
  Rows dq, dk, dv;       // null data: not wanted
  Term dbias;
  DbiasKind dbias_kind;

  int segments;
  std::int64_t segment_tile[max_segments + 1];
  const std::int64_t* slot_begin;  // [units + 1]
  const std::int64_t* slot_count;  // [units]; the unit's rows beyond are padding
  const std::int32_t* slot_keys;   // [slots]: the key of each, ascending; null: slot = key
  float* dk_sums;                  // [slots, head_dim_padded]
  float* dv_sums;
  int key_sum_heads;   // 1, or G where dbias has the heads of a group apart
  double* key_sums;    // per_key: [slots * key_sum_heads]; of a unit: [heads, slots]
  double* query_sums;  // per_query: [B, Hq, Sq]

  // dense_shared: the members of a slab are visited in parts, so that there are enough items. If there is one part, its
  // sums are in a worker's scratch memory.
  int dbias_heads;  // 1, or G where dbias has the heads of a group apart
  int dbias_parts;
  std::int64_t slabs, slab_heads;  // of dbias: (batch elements) * (kv heads), and kv heads
  std::int64_t slab_sums;          // Sq * dbias_heads * Sk
  double* dbias_sums;              // [dbias_parts, slabs, Sq, dbias_heads, Sk]
};

// The projection of a token is the sum of this many partial sums (flash_dmattn/scores.h).
inline constexpr int projection_sums = 64;
// Tokens of an item.
inline constexpr std::int64_t projection_tokens = 16;

// Tokens are [batch, seqlen] rows of features; strides in elements.
struct ScoreProjectionTask {
  std::int64_t batch, seqlen, features, heads;
  const void* hidden;
  std::int64_t hidden_batch, hidden_token;
  const void* weight;  // f32, or the dtype of hidden
  bool is_weight_f32;
  std::int64_t weight_head;
  const void* bias;  // may be null
  DType bias_dtype;
  float* scores;  // [batch, heads, seqlen]
};

// The functions of one instruction set. Items depend neither on each other nor on the worker that runs them.
struct Kernels {
  std::int64_t (*forward_scratch)(const Task&);  // bytes of a worker, a multiple of 64
  std::int64_t (*backward_scratch)(const BackwardTask&);
  std::int64_t (*forward_block_bytes)(const Task&);  // Task::packed_block_bytes
  std::int64_t (*backward_block_bytes)(const Task&);
  void (*pack_forward)(const Task&, std::int64_t item);  // B * Hkv * key_blocks items
  void (*pack_backward)(const Task&, std::int64_t item);
  void (*forward)(const ForwardTask&, std::int64_t item, void* scratch);  // B * Hkv * tiles items
  std::int64_t (*few_queries_scratch)(const ForwardTask&);                // as forward_scratch
  std::int64_t (*split_bytes)(const ForwardTask&);  // ForwardTask::split_bytes
  void (*few_queries)(const ForwardTask&, std::int64_t item,
                      void* scratch);                           // splits for each tile
  void (*merge_splits)(const ForwardTask&, std::int64_t item);  // B * Hkv * tiles items
  void (*backward)(const BackwardTask&, std::int64_t unit, void* scratch);
  // `backward` where units share dbias: segments * slabs * dbias_parts items.
  void (*shared_dbias)(const BackwardTask&, std::int64_t item, void* scratch);
  void (*add_dbias_parts)(const BackwardTask&, std::int64_t tile, std::int64_t slab);
  void (*reduce)(const BackwardTask&, std::int64_t item);  // B * Hkv * key_blocks items
  // One item for every projection_tokens tokens of all rows.
  void (*project_scores)(const ScoreProjectionTask&, std::int64_t item);
};

// By the dtype of the arrays. One translation unit each, src/cpu/isa/<name>.cpp.
struct IsaKernels {
  Kernels f32, bf16, f16;
};
extern const IsaKernels generic_kernels;
extern const IsaKernels avx2_kernels;
extern const IsaKernels avx512_kernels;
extern const IsaKernels avx512_bf16_kernels;
extern const IsaKernels amx_bf16_kernels;

}  // namespace flash_dmattn::cpu
