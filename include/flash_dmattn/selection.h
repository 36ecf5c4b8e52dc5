#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "flash_dmattn/execution.h"
#include "flash_dmattn/types.h"

// Which keys a query sees, as one interval of queries per key, and the plan a kernel works from.
//
// The score of dynamic mask attention belongs to the key, not to the pair. Under causal per-query
// top-w selection key j is visible to a query at position t >= j while fewer than w of the keys at
// positions 0..t beat it. The number of keys that beat it only grows with t, so every key is visible
// in one interval of queries, and two integers per key replace the Sq x Sk mask. Sliding windows,
// prefixes, padding and packed documents have the same form.
namespace flash_dmattn {

// Key j is visible to query i exactly when first <= i < last, with i counted in rows of q: query i
// stands at key position i + Sk - Sq. first >= last: never visible.
struct KeyInterval {
  std::int32_t first;
  std::int32_t last;
};

// [B|1, Hkv|1, Sk] intervals; strides in KeyInterval elements, 0 for a dimension of size 1, keys
// contiguous. Null data: every key is visible to every query.
struct KeyIntervals {
  const KeyInterval* data = nullptr;
  std::int64_t stride_batch = 0;
  std::int64_t stride_head = 0;
};

// [B|1, Hkv|1, n] keys in ascending order, of which every query sees all (or with `causal`, those in its
// past). What a `global` selection comes to, in half the memory of intervals or less. GPU only.
struct KeyList {
  const std::int32_t* keys =
      nullptr;  // rows of `stride` entries; beyond count, any keys of [0, Sk)
  const std::int32_t* count = nullptr;  // [B|1, Hkv|1] dense
  std::int64_t stride = 0;              // a multiple of 4, and the keys aligned to 16 bytes
};

enum class Selection : std::uint8_t {
  per_query,  // query i sees the w best among the keys it may see
  global,     // the w best keys of the row, the same for all queries (then causal)
};

// Arguments of select_key_intervals. A key beats another when its score is higher, or equal and the
// key is more recent (larger j). A NaN score and a masked key are never chosen and beat nobody.
// window >= the number of visible keys keeps them all. Without `causal`, every query may see every
// key, and per_query equals global.
struct SelectionArgs {
  Device device = Device::cpu;  // of scores, key_mask, intervals and workspace
  std::int64_t batch = 0;       // B of the result
  std::int64_t heads = 0;       // Hkv of the result, or 1
  std::int64_t seqlen_q = 0;    // Sq; intervals are clipped to [0, Sq)
  std::int64_t seqlen_k = 0;    // Sk, below 2^31 as Sq is
  std::int64_t window = 0;      // w >= 0
  Selection selection = Selection::per_query;
  bool causal = true;  // aligned to the bottom right corner: key j from query j - (Sk - Sq) on

  const void* scores = nullptr;  // [B, Hkv, Sk]; compared as stored, so -0 and +0 tie
  DType scores_dtype = DType::f32;
  std::array<std::int64_t, 3> scores_stride{};

  const std::uint8_t* key_mask = nullptr;  // [B, Hkv, Sk], 0 = masked; null: no key is masked
  std::array<std::int64_t, 3> key_mask_stride{};

  KeyInterval* intervals = nullptr;  // out: [B, Hkv, Sk] dense
};

std::size_t select_workspace_size(const SelectionArgs& args, const Execution& execution);

// Writes every interval; never-visible keys get {0, 0}. O(Sk log w) time per row, rows in parallel.
// Throws InvalidArgument. On a GPU: scores f32, bf16 or f16, Sk <= 2^23, `intervals` aligned to 8 bytes;
// the call only enqueues work on execution.stream.
void select_key_intervals(const SelectionArgs& args, const Execution& execution);

// Entries that select_key_list writes for each row.
std::int64_t key_list_stride(const SelectionArgs& args);

std::size_t select_list_workspace_size(const SelectionArgs& args);

// A global selection as a list: keys [batch, heads, key_list_stride], count [batch, heads]. Neither
// `causal` nor `intervals` nor seqlen_q of the arguments is used; a device that is not a GPU is refused.
// The call only enqueues work.
KeyList select_key_list(const SelectionArgs& args, std::int32_t* keys, std::int32_t* count,
                        const Execution& execution);

// A choice per query among the keys that a mask or a bias of pairs leaves, where no intervals express it.
// The keys of a row have ranks, 0 for the best one; query i keeps the visible keys whose rank is below its
// limit, and these are its `window` best ones. Two vectors thus stand for a second mask. GPU only. The limit
// is 0 for a window of 0, and Sk where fewer than `window` keys are visible.
struct RankArgs {
  Device device = Device::cuda;  // of all pointers and the workspace
  std::int64_t batch = 0;        // of the limits
  std::int64_t heads = 0;
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
  std::int64_t window = 0;
  bool causal = true;  // what is after the query is not visible either

  const void* scores = nullptr;  // [scores_shape, Sk], f32, bf16 or f16; as in SelectionArgs
  DType scores_dtype = DType::f32;
  std::array<std::int64_t, 2> scores_shape{};  // {batch|1, heads or a divisor of them}
  std::array<std::int64_t, 3> scores_stride{};

  // What hides pairs, [.._shape, Sq, Sk]: shapes as scores_shape, strides 0 for a dimension that
  // broadcasts. One of them may be missing, with a shape of zeros.
  const std::uint8_t* mask = nullptr;  // where it is 0
  std::array<std::int64_t, 2> mask_shape{};
  std::array<std::int64_t, 4> mask_stride{};
  const void* bias = nullptr;  // f32, bf16 or f16; where it is not above mask_value
  DType bias_dtype = DType::f32;
  std::array<std::int64_t, 2> bias_shape{};
  std::array<std::int64_t, 4> bias_stride{};
  float mask_value = 0;

  std::int32_t* key_rank = nullptr;    // out: [scores_shape, Sk] dense; Sk for a key never chosen
  std::int32_t* rank_limit = nullptr;  // out: [batch, heads, Sq] dense
};

std::size_t rank_workspace_size(const RankArgs& args);

// O(Sk log Sk) for each row of scores and O(Sq Sk / 32) for each of the limits; a bit for each pair of mask
// and bias in workspace. The call only enqueues work. The results are Inputs::key_rank as [.., .., 1, Sk] and
// Inputs::rank_limit as [.., .., Sq, 1], with the same mask, bias and causality. Throws InvalidArgument for
// shapes that do not fit each other, more than 2^23 keys, a negative window, null data or too small a
// workspace.
void rank_keys(const RankArgs& args, const Execution& execution);

// What the caller knows about intervals without reading them: any n consecutive queries together see at
// most base + per_query * n keys (and never more than Sk). A GPU needs it, because what it allocates has
// to be known before the intervals are.
//   selection of w keys              key_bound(args): {w, causal and per query ? 1 : 0}
//   sliding window of w              {w, 1}
//   packed documents of length <= l  {2 l, 1}
//   anything                         {Sk, 0}, or measure_key_bound
struct KeyBound {
  std::int64_t base = -1;  // negative: unknown
  std::int64_t per_query = 0;
  bool consecutive = false;  // what one query sees are consecutive keys, or nearly (see wants_plan)

  constexpr bool known() const { return base >= 0; }
};

// Of the intervals that select_key_intervals would write.
KeyBound key_bound(const SelectionArgs& args);

// The plan of a problem: for each tile of `tile_rows` consecutive queries, the keys that at least one
// of them sees. A tile lists its *full* keys first (visible to all its rows), then its *partial* ones,
// each group by ascending position; or all by position, and counts none as full. O(number of entries)
// memory.
struct Plan {
  std::int64_t tile_rows = 0;  // queries of a tile; the last one may have fewer
  std::int64_t tiles = 0;      // ceil(Sq / tile_rows)
  // Both [B|1, Hkv|1, tiles]: the list of tile t of (b, h) is keys[begin[.., t]] .. keys[begin[.., t] +
  // count[.., t]], of which the first full[.., t] are full. Dense strides, 0 for a dimension of size 1.
  const std::int64_t* begin = nullptr;
  const std::int32_t* count = nullptr;
  const std::int32_t* full = nullptr;
  const std::int32_t* keys = nullptr;  // [entries]
  std::int64_t stride_batch = 0;
  std::int64_t stride_head = 0;
};

// Arguments of build_plan; the plan has the batch and heads of the intervals.
struct PlanArgs {
  Device device = Device::cpu;  // of the intervals, the plan and the workspace
  std::int64_t batch = 0;       // B or 1
  std::int64_t heads = 0;       // Hkv or 1
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
  std::int64_t tile_rows = 0;  // see query_tile_rows in attention.h
  bool causal = false;         // clips every interval to queries at or after the key
  // Lists every tile's keys by position. Either kind of plan gives the same results; this kind is what
  // deterministic gradients on a GPU are quick with.
  bool by_position = false;
  KeyIntervals intervals;
  KeyBound bound;  // must be known on a GPU, is not used on the CPU
  // Instead of intervals, on a GPU. The plan's lists are then the beginnings of these, and need no memory:
  // plan_entries is 0, and PlanBuffers::keys is not used. (From a list's count on there are more keys.)
  KeyList list;
};

// Where build_plan writes; the caller allocates it.
struct PlanBuffers {
  std::int64_t* begin = nullptr;  // [batch, heads, tiles]
  std::int32_t* count = nullptr;  // [batch, heads, tiles]
  std::int32_t* full = nullptr;   // [batch, heads, tiles]
  std::int32_t* keys = nullptr;   // [plan_entries]
};

std::size_t plan_workspace_size(const PlanArgs& args, const Execution& execution);

// What PlanBuffers::keys must hold. On the CPU the number of keys in all lists together: reads the
// intervals, O(Sk + tiles) per row. On a GPU every list has the same capacity, which follows from the
// bound; nothing is read.
std::int64_t plan_entries(const PlanArgs& args, const Execution& execution);

// Builds the plan into `buffers` and returns the view of it. O(entries + Sk) time, in parallel; the
// result does not depend on the number of workers. Throws InvalidArgument. On a GPU the call only
// enqueues work, tiles may number up to 32767, and keys beyond the capacity of a list are dropped:
// intervals that break their bound make a wrong plan, but nothing is written outside the buffers.
Plan build_plan(const PlanArgs& args, const PlanBuffers& buffers, const Execution& execution);

std::size_t measure_workspace_size(const PlanArgs& args, const Execution& execution);

// A bound that holds for the intervals over runs of whole tiles, which is all that a plan needs. On a GPU
// this is the one function that waits for the device: it counts there, then synchronises
// execution.stream. Throws InvalidArgument, and std::runtime_error while the stream is being captured.
KeyBound measure_key_bound(const PlanArgs& args, const Execution& execution);

}  // namespace flash_dmattn
