#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>

#include "common/arguments.h"
#include "common/kv_cache/step.h"
#include "common/plan_content.h"
#include "common/tasks.h"
#include "cpu/forward_plan.h"
#include "cpu/kv_cache.h"
#include "cpu/kv_competition.h"
#include "cpu/make_task.h"

// KV caches on the workers, one (batch, kv head) per task. Decoding attends like any forward of few queries.
namespace flash_dmattn::cpu {
namespace {

std::int64_t rows_of(const KvCache& cache) { return cache.shape.batch * cache.shape.heads_kv; }

// Calls body(row, worker) for each (batch, kv head) of a call that there is.
template <class Body>
void for_each_row(const KvCache& cache, const Execution& execution, const Body& body) {
  for_each_task(execution, rows_of(cache), [&](std::int64_t index, int worker) {
    const std::int64_t b = index / cache.shape.heads_kv;
    const std::int64_t row = row_of(cache, b);
    if (row >= 0) body(CacheRow(cache, b, index % cache.shape.heads_kv, row), worker);
  });
}

// Calls body(b, seen) for each row of a call that there is.
template <class Body>
void for_each_seen(const KvCache& cache, const Body& body) {
  for (std::int64_t b = 0; b < cache.shape.batch; ++b) {
    const std::int64_t row = row_of(cache, b);
    if (row >= 0) body(b, seen_of(cache, row));
  }
}

void clear(const KvCache& cache, const Execution& execution) {
  for_each_row(cache, execution, [&](const CacheRow& row, int) {
    row.count = {};
    const std::int64_t slots = row.places + cache.shape.chunk;
    for (std::int64_t slot = 0; slot < slots; ++slot) {
      std::memset(row.address(cache.k, slot), 0, row.key_bytes());
      std::memset(row.address(cache.v, slot), 0, row.value_bytes());
    }
    std::fill_n(row.scores, slots, 0.0f);
    std::fill_n(row.entries, slots, 0);
  });
  for_each_seen(cache, [](std::int64_t, std::int32_t& seen) { seen = 0; });
}

void copy_rows(const CopyRowsArgs& args, const Execution& execution) {
  for_each_row(args.to, execution, [&](const CacheRow& to, int) {
    const CacheRow from(args.from, args.index[to.b], to.h, args.index[to.b]);
    to.count = from.count;
    for (std::int64_t slot = 0; slot < from.count.count; ++slot) to.copy(slot, from, slot);
    const std::int64_t end = from.places + args.from.pending;
    for (std::int64_t slot = from.places; slot < end; ++slot) to.copy(slot, from, slot);
  });
  for_each_seen(args.to, [&](std::int64_t b, std::int32_t& seen) {
    seen = seen_of(args.from, args.index[b]);
  });
}

void append(const AppendArgs& args, const Execution& execution) {
  for_each_row(args.cache, execution, [&](const CacheRow& row, int) {
    for (std::int64_t t = 0; t < args.seqlen; ++t) {
      const std::int64_t place = args.cache.pending + t;
      const float score = row.token_score(args.scores, t);
      const auto position = static_cast<std::int32_t>(row.seen() + place);
      const std::int32_t entry = row.rule.admits(score) ? position : ~position;
      row.put(row.places + place, row.token(args.k, t), row.token(args.v, t), score,
              row.is_present(args.mask, t) ? entry : no_key);
    }
  });
}

std::size_t scratch_of_workers(const KvCache& cache, const Execution& execution) {
  const std::int64_t workers = std::min<std::int64_t>(execution.workers, rows_of(cache));
  return static_cast<std::size_t>(workers) * Competition::bytes(cache);
}

char* scratch_of(const KvCache& cache, const Execution& execution, int worker) {
  return static_cast<char*>(execution.workspace) +
         static_cast<std::size_t>(worker) * Competition::bytes(cache);
}

// ---- Chunks --------------------------------------------------------------------------------------

void pending_intervals(const PendingIntervalsArgs& args, const Execution& execution) {
  const KvCache& cache = args.cache;
  const auto first_query = static_cast<std::int32_t>(cache.pending - args.seqlen_q);
  for_each_row(cache, execution, [&](const CacheRow& row, int worker) {
    const std::int32_t tokens = kept_of(args, row.b);
    const Competition competition(row, tokens, scratch_of(cache, execution, worker));
    const HeadIntervals of_head(args, row.h);
    KeyInterval* const intervals = args.intervals + row.b * of_head.row + of_head.first;
    std::fill_n(intervals, of_head.count, KeyInterval{0, 0});
    const auto before = static_cast<std::int32_t>(of_head.queries_before);
    for (std::int64_t slot = 0; slot < row.places + tokens; ++slot) {
      const bool is_taken = slot < row.count.count || slot >= row.places;
      if (!is_taken || row.entries[slot] == no_key) continue;
      const auto token = static_cast<std::int32_t>(slot - row.places);
      const std::int32_t first = std::max(token - first_query, 0);
      const std::int32_t last = std::min(competition.end_of(slot), tokens) - first_query;
      if (first < last) intervals[slot] = {before + first, before + last};
    }
  });
}

void commit(const CommitArgs& args, const Execution& execution) {
  const KvCache& cache = args.cache;
  for_each_row(cache, execution, [&](const CacheRow& row, int worker) {
    const std::int32_t tokens = kept_of(args, row.b);
    const Competition competition(row, tokens, scratch_of(cache, execution, worker));
    // The entry of a key after the last token.
    const auto entry_of = [&](std::int64_t slot) {
      const std::int32_t entry = row.entries[slot];
      if (entry == no_key || competition.end_of(slot) < tokens) return no_key;
      const bool competes = !competition.is_sink(slot) && competition.may_be_chosen(slot);
      return competes || entry < 0 ? entry : ~entry;
    };
    const std::int32_t before = row.count.count;
    for (std::int64_t slot = 0; slot < before; ++slot) row.entries[slot] = entry_of(slot);
    std::int32_t place = 0;
    for (std::int64_t slot = row.places; slot < row.places + tokens; ++slot) {
      const std::int32_t entry = entry_of(slot);
      if (entry == no_key) continue;
      while (place < before && row.entries[place] != no_key) ++place;
      row.copy(place, row, slot);
      row.entries[place++] = entry;
    }
    row.count.count = std::max(before, place);
    row.count.competed += competition.competed();
    row.find_victim(row.seen() + tokens);
    row.find_leaving(row.seen() + tokens);
  });
  for_each_seen(cache, [&](std::int64_t b, std::int32_t& seen) { seen += kept_of(args, b); });
}

// ---- Prefill -------------------------------------------------------------------------------------

// Stores the keys that the last token of a row sees, in their order, and counts those that have competed. The first of
// them are the sinks.
void store_survivors(const FillArgs& args, const CacheRow& row, std::int32_t length) {
  const KeyInterval* const intervals = args.intervals.data + row.b * args.intervals.stride_batch +
                                       row.h * args.intervals.stride_head;
  const HeadRule& rule = row.rule;
  SlotCount& slots = row.count;
  std::int32_t stored = 0;  // of those that have competed
  for (std::int32_t j = 0; j < length; ++j) {
    if (!row.is_present(args.mask, j)) continue;
    const float score = row.token_score(args.scores, j);
    const bool survives =
        intervals[j].first < intervals[j].last && intervals[j].last >= args.seqlen_q;
    const bool is_sink = survives && slots.count < rule.sinks;
    const bool is_admitted = !is_sink && rule.admits(score);
    const bool competes = is_admitted && j < length - rule.delay();
    const bool is_visible = is_sink || is_admitted || j >= length - rule.recent;
    slots.competed += competes ? 1 : 0;
    if (!survives || !is_visible || slots.count == row.places) continue;
    stored += competes ? 1 : 0;
    row.put(slots.count++, row.token(args.k, j), row.token(args.v, j), score, is_admitted ? j : ~j);
  }
  // If fewer than w keys are stored, they are all that have competed. The others of `competed` are masked keys, which a
  // call without a mask does not count.
  if (stored < rule.window) slots.competed = stored;
}

// Where recent keys compete, w better ones may have beaten some that stay visible.
void mark_beaten(const CacheRow& row) {
  const auto reaches = [&](std::int64_t slot, NarrowRank rank) {
    return row.entries[slot] >= 0 && row.rank(slot) >= rank;
  };
  const auto count_reaching = [&](NarrowRank rank) {
    std::int64_t keys = 0;
    for (std::int64_t slot = 0; slot < row.count.count; ++slot) keys += reaches(slot, rank) ? 1 : 0;
    return keys;
  };
  if (count_reaching(0) <= row.rule.window) return;
  NarrowRank least = 0;  // the largest rank that w keys reach, bit by bit
  for (NarrowRank bit = NarrowRank{1} << 63; bit != 0; bit >>= 1) {
    if (count_reaching(least | bit) >= row.rule.window) least |= bit;
  }
  for (std::int64_t slot = 0; slot < row.count.count; ++slot) {
    std::int32_t& entry = row.entries[slot];
    if (entry >= 0 && !reaches(slot, least)) entry = ~entry;
  }
}

void fill(const FillArgs& args, const Execution& execution) {
  for_each_row(args.cache, execution, [&](const CacheRow& row, int) {
    const std::int32_t length = length_of(args, row.b);
    row.count = {};
    store_survivors(args, row, length);
    if (!row.rule.delayed && row.rule.recent > 0) mark_beaten(row);
    row.find_victim(length);
    row.find_leaving(length);
  });
  for_each_seen(args.cache, [&](std::int64_t b, std::int32_t& seen) { seen = length_of(args, b); });
}

// ---- Decoding ------------------------------------------------------------------------------------

// Stores the new token where it is visible, and empties or marks the slots of keys that no longer are.
void insert(const DecodeStepArgs& args, const CacheRow& row) {
  const float score = row.token_score(args.scores, 0);
  const StepChange change =
      change_of_step(row.rule, row.count, row.seen(), score, row.is_present(args.mask, 0));
  if (change.target >= 0) {
    row.put(change.target, row.token(args.k, 0), row.token(args.v, 0), score, change.entry);
  }
  if (change.other >= 0) row.entries[change.other] = change.other_entry;
  row.count.count = change.count;
  row.count.competed = change.competed;
  row.find_leaving(row.seen() + 1);
}

ForwardArgs attention_of(const DecodeStepArgs& args) {
  ForwardArgs forward;
  forward.problem = step_problem(args);
  forward.in = inputs_of_slots(args.cache, args.q, args.score_use);
  forward.out = args.out;
  forward.lse = args.lse;
  return forward;
}

Slots slots_of(const KvCache& cache) {
  const CacheRows& rows = cache.rows;
  const KvCacheShape& s = cache.shape;
  const bool equal = s.has_equal_heads();
  return {.counts = cache.counts,
          .scores = cache.scores,
          .positions = cache.positions,
          .seen = cache.seen,
          .delay = delay_of(s.rule),
          .stride = equal && s.heads_kv > 0 ? s.slots(0) : 0,
          .windows = equal ? nullptr : s.rule.head_windows,
          .more_slots = s.rule.sink_tokens + s.rule.recent_window + s.chunk,
          .rows = rows.index,
          .rows_stride = rows.index_stride,
          .row_slots = rows.slot_stride,
          .row_counts = rows.count_stride,
          .row_seen = rows.seen_stride};
}

struct DecodeStepPlan {
  ForwardPlan attention;
  std::size_t bytes;

  DecodeStepPlan(const DecodeStepArgs& args, const Execution& execution)
      : attention(checked(args), execution, slots_of(args.cache)), bytes(attention.bytes) {}

  void run(const DecodeStepArgs& args, const Execution& execution) const {
    // A single thread writes a few rows faster than other threads wake up.
    constexpr std::int64_t few = 64;
    Execution inserting = execution;
    if (rows_of(args.cache) <= few) inserting.workers = 1;
    for_each_row(args.cache, inserting, [&](const CacheRow& row, int) { insert(args, row); });
    for_each_seen(args.cache, [](std::int64_t, std::int32_t& seen) { ++seen; });
    attention.run(attention_of(args), execution);
  }

  std::string kernel_name() const { return attention.kernel_name(); }

 private:
  static ForwardArgs checked(const DecodeStepArgs& args) {
    const KvCacheShape& s = args.cache.shape;
    if (s.heads_kv > 0 && args.heads_q / s.heads_kv > largest_group) {
      throw InvalidArgument("heads_q", std::to_string(args.heads_q),
                            "at most " + std::to_string(largest_group) + " for each kv head");
    }
    return attention_of(args);
  }
};

template <class Args>
std::size_t scratch_workspace(const Args& args, const Execution& execution) {
  return scratch_of_workers(args.cache, execution);
}

}  // namespace

const KvBackend kv_backend = {
    .find_decode_step =
        [](const KvCacheShape&, std::string&) {
          return PlanFunction<DecodeStepArgs>(make_plan<DecodeStepPlan, DecodeStepArgs>);
        },
    .clear = clear,
    .copy_rows = copy_rows,
    .fill = fill,
    .append = append,
    .plan_pending_intervals =
        make_plan<DirectPlan<PendingIntervalsArgs, scratch_workspace<PendingIntervalsArgs>,
                             pending_intervals>>,
    .plan_commit = make_plan<DirectPlan<CommitArgs, scratch_workspace<CommitArgs>, commit>>,
};

}  // namespace flash_dmattn::cpu
