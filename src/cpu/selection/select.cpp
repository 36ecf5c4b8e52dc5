#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include "common/arguments.h"
#include "common/float_types.h"
#include "common/plan_content.h"
#include "common/selection_rule.h"
#include "common/tasks.h"
#include "cpu/selection/rank.h"
#include "cpu/selection/selection.h"

// Selection sweeps over the positions of a row with a heap of the w best keys so far, the worst on top. An
// arriving key that beats the top replaces it. Under causal per-query selection, the interval of the replaced
// key ends at the position of the arrival. Under global selection, the keys in the heap at the end are selected.
//
// Keys that compete with a delay of W arrive in the same order, each W positions later, so the same sweep finds who
// replaces whom, and every interval ends W later.
namespace flash_dmattn::cpu {
namespace {

std::size_t heap_bytes(const SelectionArgs& args) {
  const std::size_t rank_bytes =
      args.scores_dtype == DType::f64 ? sizeof(WideRank) : sizeof(NarrowRank);
  return align_up(static_cast<std::size_t>(widest_window(args)) * rank_bytes);
}

// The rows of queries to which keys are visible. Row i is at position i + shift.
class QueryRows {
 public:
  explicit QueryRows(const SelectionArgs& args)
      : rows_(args.seqlen_q),
        shift_(args.causal ? args.seqlen_k - args.seqlen_q : 0),
        causal_(args.causal) {}

  // The interval of key j, which the queries at positions below `end` see.
  KeyInterval interval_until(std::int64_t j, std::int64_t end) const {
    const std::int64_t first = causal_ ? std::max(j - shift_, std::int64_t{0}) : 0;
    const std::int64_t last = std::min(end - shift_, rows_);
    if (first >= last) return {0, 0};
    return {static_cast<std::int32_t>(first), static_cast<std::int32_t>(last)};
  }

  KeyInterval interval_to_last_query(std::int64_t j) const {
    return interval_until(j, rows_ + shift_);
  }

  // Writes the intervals of the keys from begin to end - 1, each of which the next `recent` queries see.
  void fill_recent(std::int64_t begin, std::int64_t end, std::int64_t recent,
                   KeyInterval* intervals) const {
    if (recent == 0) {
      std::fill(intervals + begin, intervals + end, KeyInterval{0, 0});
    } else if (causal_ && begin >= shift_ && end - 1 + recent - shift_ <= rows_) {
      // No interval is clipped, so this loop is vectorized.
      const auto first = static_cast<std::int32_t>(begin - shift_);
      const auto length = static_cast<std::int32_t>(recent);
      const auto keys = static_cast<std::int32_t>(end - begin);
      for (std::int32_t i = 0; i < keys; ++i)
        intervals[begin + i] = {first + i, first + i + length};
    } else {
      for (std::int64_t j = begin; j < end; ++j) intervals[j] = interval_until(j, j + recent);
    }
  }

 private:
  std::int64_t rows_;
  std::int64_t shift_;
  bool causal_;
};

// The keys whose intervals are written together, before the sweep over them: 4 KB, which stay in the L1 cache.
constexpr std::int64_t block_keys = 512;

// Sweeps over one row. read(j) is the score of key j, a float or a double.
template <class Rank, class Read>
void select_row(const SelectionArgs& args, std::int64_t capacity, const Read& read,
                const std::uint8_t* key_mask, Rank* heap, KeyInterval* intervals) {
  const SelectionRule& rule = args.rule;
  const QueryRows rows(args);
  const std::int64_t recent = rule.recent_window;
  const std::int64_t delay = delay_of(rule);
  const bool closes = args.causal && rule.selection == Selection::per_query;
  // A global selection is made at the last position, where the latest keys do not compete yet.
  const std::int64_t competing = closes ? args.seqlen_k : args.seqlen_k - delay;
  std::int64_t sinks = rule.sink_tokens;
  std::int64_t size = 0;
  for (std::int64_t j = 0; j < args.seqlen_k; ++j) {
    if (j % block_keys == 0) {
      rows.fill_recent(j, std::min(j + block_keys, args.seqlen_k), recent, intervals);
    }
    if (key_mask != nullptr && key_mask[j * args.key_mask_stride[2]] == 0) {
      intervals[j] = {0, 0};
      continue;
    }
    if (sinks > 0) {
      --sinks;
      intervals[j] = rows.interval_to_last_query(j);
      continue;
    }
    if (capacity == 0 || j >= competing) continue;
    const auto score = read(j);
    const Rank rank = rank_of(score, j);
    // Most keys of a full heap end here, whether or not they reach the threshold: which do is hard to predict, and a wrong
    // prediction costs more than the rest of a key.
    if (size == capacity && rank < heap[0]) continue;
    if (!(static_cast<double>(score) >= rule.score_threshold)) continue;
    if (size < capacity) {
      heap[size++] = rank;
      if (size == capacity) std::make_heap(heap, heap + size, std::greater<>());
    } else {
      const std::int64_t beaten = position_of(heap[0]);
      const std::int64_t kept_until = closes ? j + delay : 0;
      const std::int64_t recent_until = recent > 0 ? beaten + recent : 0;
      intervals[beaten] = rows.interval_until(beaten, std::max(kept_until, recent_until));
      replace_top(heap, size, rank);
    }
    intervals[j] = rows.interval_to_last_query(j);
  }
}

void select_row(const SelectionArgs& args, std::int64_t b, std::int64_t h, void* heap) {
  const auto& stride = args.scores_stride;
  const std::int64_t offset = b * stride[0] + h * stride[1];
  const std::uint8_t* key_mask =
      args.key_mask == nullptr
          ? nullptr
          : args.key_mask + b * args.key_mask_stride[0] + h * args.key_mask_stride[1];
  KeyInterval* intervals = args.intervals + (b * args.heads + h) * args.seqlen_k;
  const auto sweep = [&]<class Stored>(const Stored* stored, const auto& widen) {
    const auto read = [=](std::int64_t j) { return widen(stored[offset + j * stride[2]]); };
    using Rank = decltype(rank_of(read(0), 0));
    select_row(args, window_of(args, h), read, key_mask, static_cast<Rank*>(heap), intervals);
  };
  switch (args.scores_dtype) {
    case DType::f32:
      return sweep(static_cast<const float*>(args.scores), [](float x) { return x; });
    case DType::f64:
      return sweep(static_cast<const double*>(args.scores), [](double x) { return x; });
    case DType::bf16:
      return sweep(static_cast<const std::uint16_t*>(args.scores),
                   [](std::uint16_t bits) { return bf16_to_float(bits); });
    case DType::f16:
      return sweep(static_cast<const std::uint16_t*>(args.scores),
                   [](std::uint16_t bits) { return f16_to_float(bits); });
  }
}

// The choice of keys, with a heap for each worker. Every row in progress has a heap, so there are no more heaps than rows.
class SelectPlan {
 public:
  std::size_t bytes;

  SelectPlan(const SelectionArgs& args, const Execution& execution) {
    if (args.scores_dtype > DType::f64) {
      throw InvalidArgument("scores_dtype", name_of(args.scores_dtype), "f32, bf16, f16 or f64");
    }
    heap_bytes_ = heap_bytes(args);
    const std::int64_t heaps = std::min<std::int64_t>(execution.workers, args.batch * args.heads);
    bytes = static_cast<std::size_t>(heaps) * heap_bytes_;
  }

  void run(const SelectionArgs& args, const Execution& execution) const {
    if (args.seqlen_k == 0) return;
    auto* const heaps = static_cast<char*>(execution.workspace);
    for_each_task(execution, args.batch * args.heads, [&](std::int64_t row, int worker) {
      void* heap = heaps + static_cast<std::size_t>(worker) * heap_bytes_;
      select_row(args, row / args.heads, row % args.heads, heap);
    });
  }

 private:
  std::size_t heap_bytes_;
};

constexpr std::int64_t unlimited_keys = std::numeric_limits<std::int64_t>::max();

}  // namespace

const SelectionBackend selection_backend = {
    .plan_select = make_plan<SelectPlan>,
    .tile_lists_workspace_size = tile_lists_workspace_size,
    .tile_list_entries = tile_list_entries,
    .build_tile_lists =
        [](const TileListArgs& args, const TileListBuffers& buffers, const Execution& execution) {
          return build_tile_lists(args, buffers, unlimited_keys, execution);
        },
    .measure_workspace_size = measure_workspace_size,
    .measure_key_bound = measure_key_bound,
};

}  // namespace flash_dmattn::cpu
