#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "flash_dmattn/attention.h"
#include "flash_dmattn/execution.h"
#include "flash_dmattn/problem.h"
#include "flash_dmattn/selection.h"
#include "flash_dmattn/types.h"
#include "flash_dmattn/visibility.h"

// The KV cache of exactly s + w + W keys of a kv head, for generation with causal per-query selection by a rule
// (SelectionRule): s sinks, the w best of the keys that compete, and the W recent keys. Both s and W may be 0, and each
// head may have a w of its own. The memory of a cache is the sum over its heads.
//
// A key that w better keys beat never returns: its score is fixed, and the number of better keys only grows. So the
// keys that the last query sees are all that any later query can see of the past, at any context length. The cache has
// s + w + W *slots* for them and g more for *pending* tokens: a chunk of a prompt or of speculated tokens that
// attention sees, and of which any number is then committed to the slots and the rest dropped.
//
// Sinks are in the first s slots. The other keys are in no order, and stay in their slots: a key that is no longer
// recent, and competes or stays chosen, is not moved. A token takes the slot of a key that it makes invisible.
//
//   prefill at once      select_key_intervals, forward, then fill_cache: the keys visible past the last query
//   prefill by chunks    append_tokens, PendingIntervalsCall, forward over the slots and the pending tokens, CommitCall
//   speculation          the same, and commit as many tokens as were accepted
//   decoding             DecodeStepCall: inserts a token, evicts the worst, attends, in one call
//
// Functions that need a workspace are calls (calls.h); their arguments are declared here.
//
// A slot carries (score, position), as the order of slots has no meaning: a key beats another when its score is
// higher, or equal and its position is larger. A key whose score is NaN or below the threshold does not compete. A
// masked token is no key, though it has a position. Rows of the batch are independent: each has its own number of
// tokens, and each (batch, kv head) its own keys.
//
// A cache without pending tokens also summarises the first part of a sequence for the rest: a shard of a
// context-parallel model sends it to the next shard, which adds its own tokens as pending.
//
// Functions change the arrays in place. They allocate nothing and, on a GPU, only enqueue work: lengths unknown to
// the host are in device memory, so all functions can be captured in a CUDA graph. They check their
// arguments first and throw InvalidArgument with nothing written.
namespace flash_dmattn {

// Sizes and dtypes have no default, here and below: -1, 0 for head_dim, and no_dtype are refused.
struct KvCacheShape {
  std::int64_t batch = -1;
  std::int64_t heads_kv = -1;
  // The rule: per_query, with at least one slot. Head h has w_h slots for selected keys: `window`, or its entry in
  // `head_windows`. A rule with a threshold needs a window, which limits the number of keys.
  SelectionRule rule{};
  std::int64_t chunk = 0;      // g >= 0, the largest number of pending tokens
  std::int64_t head_dim = 0;   // D, 1..256
  std::int64_t value_dim = 0;  // Dv, 1..D, of v and out; 0 = D
  DType dtype = no_dtype;      // of k and v: f32, bf16 or f16
  Device device = Device::cpu;

  // s + w_h + W. The slots of head h from there on are for pending tokens.
  constexpr std::int64_t places(std::int64_t h) const {
    return rule.sink_tokens + window(h) + rule.recent_window;
  }
  constexpr std::int64_t slots(std::int64_t h) const { return places(h) + chunk; }
  // The slots of a row are those of head 0, then those of head 1, ...
  constexpr std::int64_t first_slot(std::int64_t h) const {
    if (rule.head_windows == nullptr) return h * slots(0);
    std::int64_t sum = 0;
    for (std::int64_t before = 0; before < h; ++before) sum += slots(before);
    return sum;
  }
  constexpr std::int64_t total_slots() const { return first_slot(heads_kv); }
  // The places of the head that has most.
  constexpr std::int64_t most_places() const {
    std::int64_t most = rule.head_windows == nullptr ? places(0) : 0;
    for (std::int64_t h = 0; rule.head_windows != nullptr && h < heads_kv; ++h) {
      if (most < places(h)) most = places(h);
    }
    return most;
  }
  // Whether all heads have equally many slots.
  constexpr bool has_equal_heads() const {
    for (std::int64_t h = 1; rule.head_windows != nullptr && h < heads_kv; ++h) {
      if (window(h) != window(0)) return false;
    }
    return true;
  }
  constexpr std::int64_t window(std::int64_t h) const {  // w_h
    return rule.head_windows == nullptr ? rule.window : rule.head_windows[h];
  }
};

constexpr std::int64_t value_dim_of(const KvCacheShape& s) {
  return s.value_dim == 0 ? s.head_dim : s.value_dim;
}

// The entry in `positions` of a slot without a key. The entry of a key is its position if the key competes or will
// compete, else -1 - position. Keys that do not compete are sinks, keys whose score is NaN or below the threshold, and
// recent keys that w better keys beat.
inline constexpr std::int32_t no_key = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t position_of_entry(std::int32_t entry) { return entry < 0 ? ~entry : entry; }

// Where the rows of a cache are in its arrays. An engine that serves many sequences has arrays of R rows, one for each
// sequence, and calls with the B of them that it advances, in any order: no row is copied, and a CUDA graph of the call
// serves every choice of rows. Chunks (append_tokens, PendingIntervalsCall, CommitCall) take dense rows only, without an
// index: copy_rows brings a row of the arrays to a cache with places for pending tokens, and back.
struct CacheRows {
  // [B]: row b of the call is row index[b] of the arrays. No row may occur twice. A negative index (on a GPU also one
  // >= R) means no row: nothing is read or written, and the output is 0. Null: row b is row b.
  const std::int32_t* index = nullptr;
  std::int64_t count = 0;  // R, with an index
  std::int64_t index_stride = dense_stride;
  // The distances from one row of the arrays to the next, in elements.
  std::int64_t slot_stride = dense_stride;   // of scores and positions
  std::int64_t count_stride = dense_stride;  // of counts
  std::int64_t seen_stride = dense_stride;   // of seen
};

// The memory of a cache, which the caller owns. k and v hold numbers from the start (clear_cache): kernels may load a
// slot without a key, though they give it no weight. The arrays have B rows, or R with an index, each dense except for k
// and v.
struct KvCache {
  KvCacheShape shape{};
  // [B, Hkv, slots, D], D contiguous, if all heads have equally many slots; otherwise [B, 1, total_slots, D], where head h
  // begins at first_slot(h).
  Tensor4 k{};
  Tensor4 v{};                        // the same with Dv columns
  float* scores = nullptr;            // [B, total_slots], head h from first_slot(h) on
  std::int32_t* positions = nullptr;  // [B, total_slots]; 0 is the row's first token, see no_key
  // [B, Hkv]. The CPU checks them at each call. A GPU writes no slot that does not exist, whatever they are.
  SlotCount* counts = nullptr;
  std::int32_t* seen = nullptr;  // [B]: tokens of the row so far, pending ones not included
  CacheRows rows{};
  // Number of pending tokens, the same in every row, in slots [places, places + pending) of each head. The caller updates it:
  // += seqlen after append_tokens, 0 after commit.
  std::int64_t pending = 0;
};

// [B, Hkv, n] scores, in float32 whatever the dtype of the keys: in 16 bits many are equal, and rounding decides.
struct ScoreRows {
  const float* data = nullptr;
  std::array<std::int64_t, 3> stride = dense_strides<3>;
};

// [B, n], 0 = the token is padding; null data: none is.
struct TokenMask {
  const std::uint8_t* data = nullptr;
  std::array<std::int64_t, 2> stride = dense_strides<2>;
};

// ---- Memory --------------------------------------------------------------------------------------

// Size in bytes of a cache with dense, consecutive arrays, and such a cache in given memory, which must be aligned to
// workspace_alignment. The content is undefined until clear_cache; a copy of the memory is a copy of the cache.
std::size_t kv_cache_size(const KvCacheShape& shape);
KvCache kv_cache_in(std::span<std::byte> memory, const KvCacheShape& shape);

// Empties every row.
void clear_cache(const KvCache& cache, const Execution& execution, std::string_view backend = {});

// Makes row b of `to` a copy of row index[b] of `from`, its pending tokens included: reorders, repeats and selects
// rows. Both caches have equal shapes except for batch and chunk, equal `pending`, and separate memory.
struct CopyRowsArgs {
  KvCache from{};  // without an index of its own
  KvCache to{};
  // [to.shape.batch], each in [0, from.shape.batch). A GPU does not check the range; it copies nothing for an index
  // outside of it.
  const std::int32_t* index = nullptr;
};
void copy_rows(const CopyRowsArgs& args, const Execution& execution, std::string_view backend = {});

// ---- Prefill -------------------------------------------------------------------------------------

// Replaces the content of the cache by the keys of a prompt that attention has already run over.
struct FillArgs {
  KvCache cache{};
  std::int64_t seqlen_k = -1;  // S, the tokens of the prompt
  ConstTensor4 k{};            // [B, S, Hkv, D]
  ConstTensor4 v{};            // [B, S, Hkv, Dv]
  ScoreRows scores{};          // [B, Hkv, S]
  // As select_key_intervals wrote them for `seqlen_q` queries, the rule and these scores: keys with last = seqlen_q are
  // visible to the row's last token, the last query.
  KeyIntervals intervals{};  // [B, Hkv, S]
  std::int64_t seqlen_q = -1;
  // [B]: tokens of each row, later ones are ignored; null: S. A GPU clamps them to [0, S].
  const std::int32_t* lengths = nullptr;
  TokenMask mask{};  // [B, S], that of the selection
};
void fill_cache(const FillArgs& args, const Execution& execution, std::string_view backend = {});

// ---- Chunks --------------------------------------------------------------------------------------

// Appends pending tokens. The caller then does cache.pending += seqlen.
struct AppendArgs {
  KvCache cache{};
  std::int64_t seqlen = -1;  // n; cache.pending + n <= g
  ConstTensor4 k{};          // [B, n, Hkv, D]
  ConstTensor4 v{};          // [B, n, Hkv, Dv]
  ScoreRows scores{};        // [B, Hkv, n]
  TokenMask mask{};          // [B, n]
};
void append_tokens(const AppendArgs& args, const Execution& execution,
                   std::string_view backend = {});

// PendingIntervalsCall finds the slots that the last `seqlen_q` pending tokens see as queries. Slots are in no order, so
// the intervals contain causality, and the attention over them is not `causal`.
//
// If all heads have equally many slots, attention is that of Hkv heads over places + pending slots. Otherwise it has one
// kv head, whose keys are the slots of a row: the queries of head h follow those of head h - 1, and the intervals of the
// slots of head h count them.
struct PendingIntervalsArgs {
  KvCache cache{};
  std::int64_t seqlen_q = -1;  // n <= cache.pending
  // out, dense: [B, Hkv, places + pending]; with heads of different sizes [B, total_slots]
  KeyInterval* intervals = nullptr;
  // [B], as in CommitArgs. The pending tokens after them are padding: they see nothing, and no query sees them.
  const std::int32_t* kept_tokens = nullptr;
};
// The number of these intervals.
std::int64_t pending_intervals_count(const KvCache& cache);

// Whether the score of a key is also the bias of its attention score, as in dynamic mask attention, or serves the
// choice alone.
enum class ScoreUse : std::uint8_t { choose_and_bias, choose };

// The problem and the inputs of attention by the last seqlen_q (n) pending tokens, with the result of a
// PendingIntervalsCall. q is [B, n, Hq, D]. With heads of different sizes it is [B, Hkv n, G, D], row h n + i for query i of
// the G = Hq / Hkv heads that share kv head h; out is alike, and lse is [B, G, Hkv n].
Problem pending_problem(const KvCache& cache, std::int64_t heads_q, std::int64_t seqlen_q,
                        double scale, ScoreUse use = ScoreUse::choose_and_bias);
Inputs pending_inputs(const KvCache& cache, const ConstTensor4& q, std::int64_t seqlen_q,
                      const KeyInterval* intervals, ScoreUse use = ScoreUse::choose_and_bias);

// CommitCall lets the first kept_tokens[b] pending tokens of row b enter the slots in their order, each as in a step.
// The other tokens are dropped, and no token is pending afterwards: cache.pending = 0.
struct CommitArgs {
  KvCache cache{};
  // [B], each in [0, cache.pending], to which a GPU clamps them; null: all.
  const std::int32_t* kept_tokens = nullptr;
};

// ---- Decoding ------------------------------------------------------------------------------------

// DecodeStepCall inserts one token of every row and evicts what later queries do not see, then the token's query attends
// to the slots. Where no key is recent, the token may be the one that is evicted, and is then invisible to its own
// query. No token may be pending.
struct DecodeStepArgs {
  KvCache cache{};
  std::int64_t heads_q = -1;
  double scale = std::numeric_limits<double>::quiet_NaN();  // as in Problem, as are the next two
  double softcap = 0;
  NonFinite nonfinite = NonFinite::saturate;
  ScoreUse score_use = ScoreUse::choose_and_bias;

  ConstTensor4 q{};    // [B, 1, Hq, D]
  ConstTensor4 k{};    // [B, 1, Hkv, D]
  ConstTensor4 v{};    // [B, 1, Hkv, Dv]
  ScoreRows scores{};  // [B, Hkv, 1]
  TokenMask mask{};    // [B, 1]
  Tensor4 out{};       // [B, 1, Hq, Dv]
  RowValues lse{};     // [B, Hq, 1]
};

// "" when `backend` (or, with an empty name, any backend) has these functions for a cache of this shape, else why not.
std::string supports(const KvCacheShape& shape, std::string_view backend = {});

}  // namespace flash_dmattn
