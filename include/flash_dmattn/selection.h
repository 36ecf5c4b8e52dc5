#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "flash_dmattn/execution.h"
#include "flash_dmattn/types.h"
#include "flash_dmattn/visibility.h"

// Selects keys by their scores. The result says which keys are visible: intervals or a list. Sizes have no default: -1 is refused.
namespace flash_dmattn {

enum class Selection : std::uint8_t {
  per_query,  // query i sees the w best among the keys it may see
  global,     // the w best keys of the row, the same for all queries (then causal)
};

// No budget: `window` of a selection that a threshold alone limits.
inline constexpr std::int64_t every_key = std::numeric_limits<std::int64_t>::max();

// Which present keys a query sees. With `causal`, the query at position t sees key j <= t when
//   - j is one of the first `sink_tokens` present keys of the row, or
//   - t - j < recent_window (the query's own key is the first of them), or
//   - its score is not NaN, score >= score_threshold, and it is among the best `window` of the keys that compete.
// Sinks do not compete. A key beats another when its score is higher, or equal and the key is more recent (larger j).
// Without `causal`, every query may see every key, per_query equals global, and no key is recent.
struct SelectionRule {
  std::int64_t window = -1;  // w >= 0, or every_key; to be given unless head_windows is
  Selection selection = Selection::per_query;
  std::int64_t recent_window = 0;  // W >= 0; above 0 with `causal` only
  // False: only keys with t - j >= recent_window compete, and a query sees the w best of these and the recent ones.
  // True: a key competes from the moment it is written, so that a query sees the recent keys and the w best of all.
  bool recent_competes = false;
  std::int64_t sink_tokens = 0;  // s >= 0
  double score_threshold = -std::numeric_limits<double>::infinity();
  // [heads] in host memory: w of each head; null: `window` for all. A call of calls.h reads it when it is made and when
  // it runs, so it must be valid and unchanged until the call has run.
  const std::int64_t* head_windows = nullptr;

  bool operator==(const SelectionRule&) const = default;
};

// Arguments of select_key_intervals. A key whose mask is 0 is not present: it is never visible and competes with none.
struct SelectionArgs {
  Device device = Device::cpu;  // of scores, key_mask, intervals and workspace
  std::int64_t batch = -1;      // B of the result
  std::int64_t heads = -1;      // Hkv of the result, or 1
  std::int64_t seqlen_q = -1;   // Sq; intervals are clipped to [0, Sq)
  std::int64_t seqlen_k = -1;   // Sk, below 2^31 as Sq is
  SelectionRule rule;
  bool causal = true;  // aligned to the bottom right corner: key j from query j - (Sk - Sq) on

  const void* scores = nullptr;   // [B, Hkv, Sk]; compared as stored, so -0 and +0 tie
  DType scores_dtype = no_dtype;  // to be given
  std::array<std::int64_t, 3> scores_stride = dense_strides<3>;

  const std::uint8_t* key_mask = nullptr;  // [B, Hkv, Sk], 0 = masked; null: no key is masked
  std::array<std::int64_t, 3> key_mask_stride = dense_strides<3>;

  KeyInterval* intervals = nullptr;  // out: [B, Hkv, Sk] dense
};

// Writes every interval; never-visible keys get {0, 0}. O(Sk log w) time per row, rows in parallel.
// Throws InvalidArgument. On a GPU: scores f32, bf16 or f16, Sk <= 2^23, `intervals` aligned to 8 bytes;
// the call only enqueues work on execution.stream. The workspace has SelectCall::workspace_size bytes (calls.h).
void select_key_intervals(const SelectionArgs& args, const Execution& execution);

// Bound of the intervals that select_key_intervals writes for these arguments. Throws InvalidArgument.
KeyBound key_bound(const SelectionArgs& args);

// Arguments of measure_key_bound.
struct MeasureArgs {
  Device device = Device::cpu;  // of the intervals and the workspace
  std::int64_t batch = -1;      // B or 1
  std::int64_t heads = -1;      // Hkv or 1
  std::int64_t seqlen_q = -1;
  std::int64_t seqlen_k = -1;
  bool causal = false;  // clips every interval to queries at or after the key
  KeyIntervals intervals{};
};

std::size_t measure_workspace_size(const MeasureArgs& args, const Execution& execution);

// Measures a bound that holds for tiles of queries, which is what GPU kernels need. On a GPU this is the only function
// here that waits: it counts on the device and synchronises execution.stream. Throws InvalidArgument, and std::runtime_error
// while the stream is being captured.
KeyBound measure_key_bound(const MeasureArgs& args, const Execution& execution);

}  // namespace flash_dmattn
