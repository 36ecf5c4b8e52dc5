#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>

#include "common/arguments.h"
#include "common/kv_cache/views.h"
#include "common/plan_content.h"
#include "flash_dmattn/calls.h"
#include "reference/kernels.h"

// The KV cache as plain loops: tokens enter one after the other, and after each one the keys that the rule shows to its
// query stay.
namespace flash_dmattn::reference {
namespace {

// A key that a query may see, and where it is.
struct Key {
  std::int64_t slot;  // -1: in none
  std::int64_t position;
  float score;
  bool is_sink;
};

// The slots of a (batch, kv head), in row `row` of the arrays.
struct Row {
  const KvCache& cache;
  std::int64_t b, h;
  std::int64_t row;

  SlotCount& count() const { return cache.counts[row * cache.rows.count_stride + h]; }
  std::int32_t& seen() const { return seen_of(cache, row); }
  std::int64_t places() const { return cache.shape.places(h); }
  std::int64_t place(std::int64_t slot) const {
    return row * cache.rows.slot_stride + cache.shape.first_slot(h) + slot;
  }
  float& score(std::int64_t slot) const { return cache.scores[place(slot)]; }
  std::int32_t& entry(std::int64_t slot) const { return cache.positions[place(slot)]; }
  char* address(const Tensor4& t, std::int64_t slot) const {
    const std::int64_t at = row * t.stride[0] + h * t.stride[1] +
                            (head_slots(cache.shape, h).rows_before + slot) * t.stride[2];
    return static_cast<char*>(t.data) + at * size_of(cache.shape.dtype);
  }
  std::size_t key_bytes() const {
    return static_cast<std::size_t>(cache.shape.head_dim * size_of(cache.shape.dtype));
  }
  std::size_t value_bytes() const {
    return static_cast<std::size_t>(value_dim_of(cache.shape) * size_of(cache.shape.dtype));
  }
  bool holds_key(std::int64_t slot) const {
    return (slot < count().count || slot >= places()) && entry(slot) != no_key;
  }

  void put(std::int64_t slot, const char* k, const char* v, float s, std::int32_t at) const {
    std::memcpy(address(cache.k, slot), k, key_bytes());
    std::memcpy(address(cache.v, slot), v, value_bytes());
    score(slot) = s;
    entry(slot) = at;
  }
};

// The keys in the slots of a row, its first `pending` tokens, and perhaps one more. The first keys of a row are sinks.
struct Keys {
  const Row& row;
  std::int64_t pending = 0;
  const Key* more = nullptr;

  template <class Body>
  void for_each(const Body& body) const {
    const std::int64_t sinks = row.cache.shape.rule.sink_tokens, places = row.places();
    std::int64_t found = 0;
    for (std::int64_t slot = 0; slot < places + pending; ++slot) {
      if (!row.holds_key(slot)) continue;
      const bool is_sink = slot < places ? slot < sinks : found < sinks;
      body(Key{slot, position_of_entry(row.entry(slot)), row.score(slot), is_sink});
      ++found;
    }
    if (more != nullptr) body(*more);
  }
};

// The definition of the rule: which keys the query at `position` sees. No key is later. Unseen keys may be removed,
// because each of them is beaten by w visible keys, which also beat every worse key.
class Rule {
 public:
  Rule(const Keys& keys, std::int64_t position)
      : rule_(keys.row.cache.shape.rule),
        window_(keys.row.cache.shape.window(keys.row.h)),
        keys_(keys),
        position_(position) {}

  std::int64_t window() const { return window_; }
  bool is_recent(const Key& key) const { return position_ - key.position < rule_.recent_window; }
  bool is_admitted(const Key& key) const {
    return !key.is_sink && window_ > 0 && double{key.score} >= rule_.score_threshold;
  }
  bool competes(const Key& key) const {
    return is_admitted(key) && (rule_.recent_competes || !is_recent(key));
  }
  bool is_chosen(const Key& key) const {
    if (!competes(key)) return false;
    std::int64_t beaten_by = 0;
    keys_.for_each([&](const Key& other) {
      const bool beats =
          other.score > key.score || (other.score == key.score && other.position > key.position);
      beaten_by += competes(other) && beats ? 1 : 0;
    });
    return beaten_by < window_;
  }
  bool is_visible(const Key& key) const { return key.is_sink || is_recent(key) || is_chosen(key); }
  // Whether the key will compete, when it is no longer recent.
  bool will_compete(const Key& key) const { return is_admitted(key) && !competes(key); }

 private:
  const SelectionRule& rule_;
  std::int64_t window_;
  Keys keys_;
  std::int64_t position_;
};

// The entry of a key at a position.
std::int32_t entry_of(std::int64_t position, bool may_be_chosen) {
  const auto at = static_cast<std::int32_t>(position);
  return may_be_chosen ? at : ~at;
}

// Empties the slots of keys that the query at `position`, the last one so far, does not see. `more`: the key of the
// query's own token, which has no slot yet.
void keep_visible(const Row& row, std::int64_t position, const Key* more = nullptr) {
  const Rule rule({row, 0, more}, position);
  Keys{row}.for_each([&](const Key& key) {
    if (!rule.is_visible(key)) row.entry(key.slot) = no_key;
  });
}

// Describes the slots, all keys in which the query at `position` sees.
void describe_slots(const Row& row, std::int64_t position) {
  const Rule rule({row}, position);
  const std::int64_t recent = row.cache.shape.rule.recent_window;
  SlotCount& slots = row.count();
  slots.leaving = -1;
  Key worst{-1, 0, 0, false};
  Keys{row}.for_each([&](const Key& key) {
    const bool is_chosen = rule.is_chosen(key);
    const bool may_be_chosen = is_chosen || rule.will_compete(key);
    row.entry(key.slot) = entry_of(key.position, may_be_chosen);
    if (!key.is_sink && position - key.position == recent - 1) {
      slots.leaving = static_cast<std::int32_t>(key.slot);
      slots.leaving_score = may_be_chosen ? key.score : std::numeric_limits<float>::quiet_NaN();
    }
    if (!is_chosen) return;
    const bool is_worse =
        key.score < worst.score || (key.score == worst.score && key.position < worst.position);
    if (worst.slot < 0 || is_worse) worst = key;
  });
  slots.free = 0;
  while (slots.free < slots.count && row.holds_key(slots.free)) ++slots.free;
  if (worst.slot < 0) return;
  slots.victim = static_cast<std::int32_t>(worst.slot);
  slots.victim_score = worst.score;
  slots.victim_position = static_cast<std::int32_t>(worst.position);
}

// A token of a row. A masked one is not present.
struct Token {
  const char* k;
  const char* v;
  float score;
  bool is_present;
};

// Inserts the token at `position`.
void enter(const Row& row, const Token& token, std::int64_t position) {
  SlotCount& slots = row.count();
  const Key key{-1, position, token.score, slots.count < row.cache.shape.rule.sink_tokens};
  const Keys keys{row, 0, token.is_present ? &key : nullptr};
  const Rule rule(keys, position), before(keys, position - 1);
  // The token begins to compete, or the key that is no longer recent.
  keys.for_each([&](const Key& k) {
    const bool begins = k.position == position || !before.competes(k);
    slots.competed += rule.competes(k) && begins ? 1 : 0;
  });
  const bool stays = token.is_present && rule.is_visible(key);
  keep_visible(row, position, keys.more);
  if (stays) {
    std::int32_t slot = 0;
    while (slot < slots.count && row.holds_key(slot)) ++slot;
    slots.count = std::max(slots.count, slot + 1);
    row.put(slot, token.k, token.v, token.score, static_cast<std::int32_t>(position));
  }
  describe_slots(row, position);
}

// Calls body(b, row) for the rows of a call that there are.
template <class Body>
void for_each_batch(const KvCache& cache, const Body& body) {
  for (std::int64_t b = 0; b < cache.shape.batch; ++b) {
    const std::int64_t row = row_of(cache, b);
    if (row >= 0) body(b, row);
  }
}

template <class Body>
void for_each_row(const KvCache& cache, const Body& body) {
  for_each_batch(cache, [&](std::int64_t b, std::int64_t row) {
    for (std::int64_t h = 0; h < cache.shape.heads_kv; ++h) body(Row{cache, b, h, row});
  });
}

// Token t of [B, S, Hkv, D].
const char* address_of(const ConstTensor4& tensor, const Row& row, std::int64_t t) {
  const std::int64_t at =
      row.b * tensor.stride[0] + t * tensor.stride[1] + row.h * tensor.stride[2];
  return static_cast<const char*>(tensor.data) + at * size_of(row.cache.shape.dtype);
}

template <class Args>
Token token_of(const Args& args, const Row& row, std::int64_t t) {
  const ScoreRows& scores = args.scores;
  const TokenMask& mask = args.mask;
  return {address_of(args.k, row, t), address_of(args.v, row, t),
          scores.data[row.b * scores.stride[0] + row.h * scores.stride[1] + t * scores.stride[2]],
          mask.data == nullptr || mask.data[row.b * mask.stride[0] + t * mask.stride[1]] != 0};
}

void clear(const KvCache& cache, const Execution&) {
  for_each_row(cache, [](const Row& row) {
    row.count() = {};
    for (std::int64_t slot = 0; slot < row.cache.shape.slots(row.h); ++slot) {
      row.score(slot) = 0;
      row.entry(slot) = 0;
      std::memset(row.address(row.cache.k, slot), 0, row.key_bytes());
      std::memset(row.address(row.cache.v, slot), 0, row.value_bytes());
    }
  });
  for_each_batch(cache, [&](std::int64_t, std::int64_t row) { seen_of(cache, row) = 0; });
}

void copy_rows(const CopyRowsArgs& args, const Execution&) {
  for_each_row(args.to, [&](const Row& to) {
    const std::int64_t places = to.places();
    const Row from{args.from, args.index[to.b], to.h, args.index[to.b]};
    to.count() = from.count();
    const auto copy = [&](std::int64_t slot) {
      to.put(slot, from.address(args.from.k, slot), from.address(args.from.v, slot),
             from.score(slot), from.entry(slot));
    };
    for (std::int64_t slot = 0; slot < from.count().count; ++slot) copy(slot);
    for (std::int64_t slot = places; slot < places + args.from.pending; ++slot) copy(slot);
  });
  for_each_batch(args.to, [&](std::int64_t b, std::int64_t row) {
    seen_of(args.to, row) = seen_of(args.from, args.index[b]);
  });
}

void fill(const FillArgs& args, const Execution&) {
  const KeyIntervals& intervals = args.intervals;
  for_each_row(args.cache, [&](const Row& row) {
    SlotCount& slots = row.count() = {};
    const std::int64_t length = length_of(args, row.b);
    const Rule rule({row}, length - 1);
    std::int32_t hidden = 0;  // keys that have competed, of those that are not stored
    for (std::int64_t j = 0; j < length; ++j) {
      const Token token = token_of(args, row, j);
      const KeyInterval interval =
          intervals.data[row.b * intervals.stride_batch + row.h * intervals.stride_head + j];
      const bool survives = interval.first < interval.last && interval.last >= args.seqlen_q;
      if (!token.is_present) continue;
      if (survives && slots.count < row.places()) {
        row.put(slots.count++, token.k, token.v, token.score, static_cast<std::int32_t>(j));
      } else {
        hidden += rule.competes({-1, j, token.score, false}) ? 1 : 0;
      }
    }
    Keys{row}.for_each([&](const Key& key) { slots.competed += rule.competes(key) ? 1 : 0; });
    // All that have competed are chosen while there are at most w.
    if (slots.competed >= rule.window()) slots.competed += hidden;
    keep_visible(row, length - 1);
    describe_slots(row, length - 1);
  });
  for_each_batch(args.cache, [&](std::int64_t b, std::int64_t row) {
    seen_of(args.cache, row) = length_of(args, b);
  });
}

void append(const AppendArgs& args, const Execution&) {
  const KvCache& cache = args.cache;
  for_each_row(cache, [&](const Row& row) {
    for (std::int64_t t = 0; t < args.seqlen; ++t) {
      const Token token = token_of(args, row, t);
      const std::int64_t place = cache.pending + t;
      const auto position = static_cast<std::int32_t>(row.seen() + place);
      const bool competes = Rule({row}, position).is_admitted({-1, position, token.score, false});
      row.put(row.places() + place, token.k, token.v, token.score,
              token.is_present ? entry_of(position, competes) : no_key);
    }
  });
}

// Computes every query's intervals by the definition.
void pending_intervals(const PendingIntervalsArgs& args, const Execution&) {
  const KvCache& cache = args.cache;
  for_each_row(cache, [&](const Row& row) {
    const HeadIntervals of_head(args, row.h);
    KeyInterval* const intervals = args.intervals + row.b * of_head.row + of_head.first;
    std::fill_n(intervals, of_head.count, KeyInterval{0, 0});
    for (std::int64_t i = 0; i < args.seqlen_q; ++i) {
      const std::int64_t token = cache.pending - args.seqlen_q + i;
      if (token >= kept_of(args, row.b)) break;
      const Keys keys{row, token + 1};
      const Rule rule(keys, row.seen() + token);
      keys.for_each([&](const Key& key) {
        if (!rule.is_visible(key)) return;
        const auto query = static_cast<std::int32_t>(of_head.queries_before + i);
        if (intervals[key.slot].last == 0) intervals[key.slot].first = query;
        intervals[key.slot].last = query + 1;
      });
    }
  });
}

void commit(const CommitArgs& args, const Execution&) {
  const KvCache& cache = args.cache;
  for_each_row(cache, [&](const Row& row) {
    for (std::int64_t i = 0; i < kept_of(args, row.b); ++i) {
      const std::int64_t slot = row.places() + i;
      enter(row,
            {row.address(cache.k, slot), row.address(cache.v, slot), row.score(slot),
             row.entry(slot) != no_key},
            row.seen() + i);
    }
  });
  for_each_batch(
      cache, [&](std::int64_t b, std::int64_t row) { seen_of(cache, row) += kept_of(args, b); });
}

// ---- Decoding ------------------------------------------------------------------------------------

// The attention of the query heads of a row to its slots.
ForwardArgs attention_of(const DecodeStepArgs& args, const Row& row, const KeyInterval* intervals) {
  const KvCacheShape& s = args.cache.shape;
  const std::int64_t group = args.heads_q / s.heads_kv, bytes = size_of(s.dtype);
  const auto advance = [](const void* data, std::int64_t by) {
    return data == nullptr ? nullptr : static_cast<char*>(const_cast<void*>(data)) + by;
  };
  const auto advance_to_heads = [&](auto& tensor) {
    tensor.data =
        advance(tensor.data, (row.b * tensor.stride[0] + row.h * group * tensor.stride[2]) * bytes);
  };
  DecodeStepArgs of_row = args;
  KvCache& cache = of_row.cache;
  cache.shape.batch = cache.shape.heads_kv = 1;
  of_row.heads_q = group;
  cache.k.data = row.address(cache.k, 0);
  cache.v.data = row.address(cache.v, 0);
  cache.scores += row.place(0);
  advance_to_heads(of_row.q);
  advance_to_heads(of_row.out);
  ForwardArgs forward;
  forward.problem = step_problem(of_row);
  forward.problem.seqlen_k = row.places();
  if (args.score_use == ScoreUse::choose_and_bias) forward.problem.bias_shape[3] = row.places();
  forward.problem.intervals_shape = {1, 1};
  forward.in = inputs_of_slots(cache, of_row.q, args.score_use);
  forward.in.visibility.intervals.data = intervals;
  forward.out = of_row.out;
  forward.lse = args.lse;
  forward.lse.data =
      advance(args.lse.data, (row.b * args.heads_q + row.h * group) * size_of(args.lse.dtype));
  return forward;
}

// The intervals of the slots of a head, then the workspace of its attention.
struct DecodeStepPlan {
  std::size_t intervals_bytes;
  std::size_t bytes;

  DecodeStepPlan(const DecodeStepArgs& args, const Execution& execution)
      : intervals_bytes(align_up(static_cast<std::size_t>(args.cache.shape.most_places()) *
                                 sizeof(KeyInterval))),
        bytes(intervals_bytes) {
    const KvCacheShape& s = args.cache.shape;
    std::size_t most = 0;
    for (std::int64_t h = 0; s.batch > 0 && h < s.heads_kv; ++h) {
      const ForwardCall call = attention(args, {args.cache, 0, h, 0}, &some_intervals, execution);
      most = std::max(most, call.workspace_size());
    }
    bytes += most;
  }

  // A row of the call without a row of the cache sees no key.
  void run(const DecodeStepArgs& args, const Execution& execution) const {
    const KvCache& cache = args.cache;
    auto* const intervals = static_cast<KeyInterval*>(execution.workspace);
    const std::span rest(static_cast<std::byte*>(execution.workspace) + intervals_bytes,
                         execution.workspace_bytes - intervals_bytes);
    for_each_row(cache, [&](const Row& row) { enter(row, token_of(args, row, 0), row.seen()); });
    for_each_batch(cache, [&](std::int64_t, std::int64_t row) { ++seen_of(cache, row); });
    for (std::int64_t b = 0; b < cache.shape.batch; ++b) {
      const std::int64_t row_number = row_of(cache, b);
      for (std::int64_t h = 0; h < cache.shape.heads_kv; ++h) {
        const Row row{cache, b, h, std::max<std::int64_t>(row_number, 0)};
        for (std::int64_t slot = 0; slot < row.places(); ++slot) {
          intervals[slot] = {0, row_number >= 0 && row.holds_key(slot) ? 1 : 0};
        }
        attention(args, row, intervals, execution).run(rest);
      }
    }
  }

 private:
  static constexpr KeyInterval some_intervals{};

  static ForwardCall attention(const DecodeStepArgs& args, const Row& row,
                               const KeyInterval* intervals, const Execution& execution) {
    return ForwardCall(attention_of(args, row, intervals), execution, "reference");
  }
};

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
    .plan_pending_intervals = make_plan<
        DirectPlan<PendingIntervalsArgs, no_workspace<PendingIntervalsArgs>, pending_intervals>>,
    .plan_commit = make_plan<DirectPlan<CommitArgs, no_workspace<CommitArgs>, commit>>,
};

}  // namespace flash_dmattn::reference
