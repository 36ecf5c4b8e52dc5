#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>

#include "arguments.h"
#include "cpu/forward_call.h"
#include "cpu/kv_cache.h"
#include "cpu/make_task.h"
#include "cpu/selection/rank.h"
#include "kv_cache_step.h"
#include "plan.h"
#include "tasks.h"

// KV caches on the workers, one (batch, kv head) per task. Decoding attends like any forward of few queries.
namespace flash_dmattn::cpu {
namespace {

// The slots of a (batch, kv head).
struct Row {
  const KvCache& cache;
  std::int64_t b, h;
  std::int64_t index;
  HeadRule rule;
  std::int64_t places;
  SlotCount& count;
  float* scores;
  std::int32_t* entries;

  Row(const KvCache& c, std::int64_t index_)
      : cache(c),
        b(index_ / c.shape.heads_kv),
        h(index_ % c.shape.heads_kv),
        index(index_),
        rule(rule_of_head(c.shape, h)),
        places(c.shape.places()),
        count(c.counts[index]),
        scores(c.scores + index * c.shape.slots()),
        entries(c.positions + index * c.shape.slots()) {}

  std::int32_t seen() const { return cache.seen[b]; }

  char* address(const Tensor4& t, std::int64_t slot) const {
    const std::int64_t at = b * t.stride[0] + h * t.stride[1] + slot * t.stride[2];
    return static_cast<char*>(t.data) + at * size_of(cache.shape.dtype);
  }

  // The row of token t in a tensor [B, S, Hkv, D].
  const char* token(const ConstTensor4& tensor, std::int64_t t) const {
    const std::int64_t at = b * tensor.stride[0] + t * tensor.stride[1] + h * tensor.stride[2];
    return static_cast<const char*>(tensor.data) + at * size_of(cache.shape.dtype);
  }
  float token_score(const ScoreRows& s, std::int64_t t) const {
    return s.data[b * s.stride[0] + h * s.stride[1] + t * s.stride[2]];
  }
  bool is_present(const TokenMask& mask, std::int64_t t) const {
    return mask.data == nullptr || mask.data[b * mask.stride[0] + t * mask.stride[1]] != 0;
  }

  void put(std::int64_t slot, const char* k, const char* v, float score, std::int32_t entry) const {
    const auto bytes = static_cast<std::size_t>(cache.shape.head_dim * size_of(cache.shape.dtype));
    std::memcpy(address(cache.k, slot), k, bytes);
    std::memcpy(address(cache.v, slot), v, bytes);
    scores[slot] = score;
    entries[slot] = entry;
  }

  // Copies a slot of `from`, which may be this row.
  void copy(std::int64_t slot, const Row& from, std::int64_t source) const {
    put(slot, from.address(from.cache.k, source), from.address(from.cache.v, source),
        from.scores[source], from.entries[source]);
  }

  NarrowRank rank(std::int64_t slot) const { return rank_of(scores[slot], entries[slot]); }

  // Whether the key in a slot competes among the first `tokens` tokens.
  bool competes(std::int64_t slot, std::int32_t tokens) const {
    return 0 <= entries[slot] && entries[slot] < tokens - rule.delay();
  }

  // Finds the victim among the first `tokens` tokens.
  void find_victim(std::int32_t tokens) const {
    std::int32_t worst = -1;
    for (std::int32_t slot = 0; slot < count.count; ++slot) {
      if (competes(slot, tokens) && (worst < 0 || rank(slot) < rank(worst))) worst = slot;
    }
    if (worst >= 0) set_victim(worst);
  }
  void set_victim(std::int32_t slot) const {
    count.victim = slot;
    count.victim_score = scores[slot];
    count.victim_position = entries[slot];
  }

  // Finds the first slot without a key and, after `tokens` tokens, the key that is recent for the last time.
  void find_leaving(std::int32_t tokens) const {
    count.free = count.count;
    count.leaving = -1;
    if (rule.recent == 0) return;  // no key leaves without a successor either
    const std::int32_t position = tokens - rule.recent;
    std::int32_t free = count.count;
    std::int32_t leaving = -1;
    for (std::int32_t slot = rule.sinks; slot < count.count; ++slot) {
      const std::int32_t entry = entries[slot];
      free = entry == no_key && slot < free ? slot : free;
      leaving = entry == position || entry == ~position ? slot : leaving;
    }
    if (position < 0) leaving = -1;
    count.free = free;
    count.leaving = leaving;
    if (leaving < 0) return;
    count.leaving_score =
        entries[leaving] < 0 ? std::numeric_limits<float>::quiet_NaN() : scores[leaving];
  }
};

std::int64_t rows_of(const KvCache& cache) { return cache.shape.batch * cache.shape.heads_kv; }

template <class Body>
void for_each_row(const KvCache& cache, const Execution& execution, const Body& body) {
  for_each_task(execution, rows_of(cache),
                [&](std::int64_t index, int worker) { body(Row(cache, index), worker); });
}

void clear(const KvCache& cache, const Execution& execution) {
  const auto bytes = static_cast<std::size_t>(cache.shape.head_dim * size_of(cache.shape.dtype));
  for_each_row(cache, execution, [&](const Row& row, int) {
    row.count = {};
    for (std::int64_t slot = 0; slot < cache.shape.slots(); ++slot) {
      std::memset(row.address(cache.k, slot), 0, bytes);
      std::memset(row.address(cache.v, slot), 0, bytes);
    }
    std::fill_n(row.scores, cache.shape.slots(), 0.0f);
    std::fill_n(row.entries, cache.shape.slots(), 0);
  });
  std::fill_n(cache.seen, cache.shape.batch, 0);
}

void copy_rows(const CopyRowsArgs& args, const Execution& execution) {
  for_each_row(args.to, execution, [&](const Row& to, int) {
    const Row from(args.from, args.index[to.b] * args.from.shape.heads_kv + to.h);
    to.count = from.count;
    for (std::int64_t slot = 0; slot < from.count.count; ++slot) to.copy(slot, from, slot);
    const std::int64_t end = from.places + args.from.pending;
    for (std::int64_t slot = from.places; slot < end; ++slot) to.copy(slot, from, slot);
  });
  for (std::int64_t b = 0; b < args.to.shape.batch; ++b) {
    args.to.seen[b] = args.from.seen[args.index[b]];
  }
}

void append(const AppendArgs& args, const Execution& execution) {
  for_each_row(args.cache, execution, [&](const Row& row, int) {
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

// ---- Competition ---------------------------------------------------------------------------------

// The best keys of a row, at most w of them, while keys are added one by one.
class BestKeys {
 public:
  struct Key {
    NarrowRank rank;
    std::int64_t slot;
    friend bool operator<(const Key& a, const Key& b) { return a.rank < b.rank; }
    friend bool operator>(const Key& a, const Key& b) { return a.rank > b.rank; }
  };
  static constexpr std::int64_t none = -1;

  BestKeys(const Row& row, Key* memory) : row_(row), keys_(memory) {}

  // Adds the key in `slot`. Returns the slot of the key that leaves, possibly `slot` itself, or none if there was room.
  std::int64_t add(std::int64_t slot) {
    const Key key{row_.rank(slot), slot};
    if (size_ < row_.rule.window) {
      keys_[size_++] = key;
      if (size_ == row_.rule.window) std::make_heap(keys_, keys_ + size_, std::greater<>());
      return none;
    }
    if (key < keys_[0]) return slot;  // the worst key comes first once the heap is full
    const std::int64_t leaving = keys_[0].slot;
    replace_top(keys_, size_, key);
    return leaving;
  }

 private:
  const Row& row_;
  Key* keys_;
  std::int64_t size_ = 0;
};

// What becomes of the keys of a row while its first `tokens` pending tokens come. A worker has memory for it.
class Competition {
 public:
  static constexpr std::int32_t never = std::numeric_limits<std::int32_t>::max();

  static std::size_t bytes(const KvCache& cache) {
    return align_up(places_bytes(cache.shape.keep.window, sizeof(BestKeys::Key))) +
           align_up(places_bytes(cache.shape.places() + cache.pending, sizeof(std::int32_t))) +
           align_up(places_bytes(cache.pending, sizeof(std::int32_t)));
  }

  Competition(const Row& row, std::int64_t tokens, char* memory)
      : row_(row), tokens_(static_cast<std::int32_t>(tokens)) {
    const KvCache& cache = row.cache;
    auto* const keys = reinterpret_cast<BestKeys::Key*>(memory);
    memory += align_up(places_bytes(cache.shape.keep.window, sizeof(BestKeys::Key)));
    beaten_by_ = reinterpret_cast<std::int32_t*>(memory);
    memory += align_up(places_bytes(row.places + cache.pending, sizeof(std::int32_t)));
    arrivals_ = reinterpret_cast<std::int32_t*>(memory);
    find_sinks();
    std::fill_n(beaten_by_, row.places + tokens, never);
    std::fill_n(arrivals_, tokens, -1);
    BestKeys best(row, keys);
    for (std::int64_t slot = 0; slot < row.count.count; ++slot) arrive(slot, best);
    for (std::int64_t i = sink_end_; i < tokens; ++i) arrive(row.places + i, best);
    for (std::int32_t i = 0; i < tokens_; ++i) {
      if (arrivals_[i] < 0) continue;
      ++competed_;
      const std::int64_t leaving = best.add(arrivals_[i]);
      if (leaving != BestKeys::none) beaten_by_[leaving] = i;
    }
  }

  // Whether the key in `slot` is a sink.
  bool is_sink(std::int64_t slot) const {
    return slot < row_.places ? slot < row_.rule.sinks : slot - row_.places < sink_end_;
  }
  // The pending token that is the first to see the key no longer. That may be the token itself.
  std::int32_t end_of(std::int64_t slot) const {
    if (is_sink(slot)) return never;
    const std::int32_t entry = row_.entries[slot];
    const std::int32_t recent_end = position_of_entry(entry) + row_.rule.recent - row_.seen();
    return entry < 0 ? recent_end : std::max(recent_end, beaten_by_[slot]);
  }
  // Whether a key that is no sink is or may become one of the best.
  bool may_be_chosen(std::int64_t slot) const {
    return row_.entries[slot] >= 0 && beaten_by_[slot] == never;
  }
  // The number of keys that began to compete.
  std::int32_t competed() const { return competed_; }

 private:
  static std::size_t places_bytes(std::int64_t places, std::size_t size) {
    return static_cast<std::size_t>(places) * size;
  }

  // The first keys of a text are sinks. Until there are enough of them, no slot but theirs is taken.
  void find_sinks() {
    std::int32_t missing = row_.rule.sinks - row_.count.count;
    for (; missing > 0 && sink_end_ < tokens_; ++sink_end_) {
      missing -= row_.entries[row_.places + sink_end_] == no_key ? 0 : 1;
    }
  }

  // Adds a key that competes before the first token, or notes when it begins to.
  void arrive(std::int64_t slot, BestKeys& best) {
    const std::int32_t entry = row_.entries[slot];
    if (entry < 0) return;
    const std::int32_t token = entry + row_.rule.delay() - row_.seen();
    if (token < 0) {
      best.add(slot);
    } else if (token < tokens_) {
      arrivals_[token] = static_cast<std::int32_t>(slot);
    }
  }

  const Row& row_;
  std::int32_t tokens_;
  std::int32_t sink_end_ = 0;  // the pending keys before it are sinks
  std::int32_t competed_ = 0;
  std::int32_t* beaten_by_;  // [places + pending]: the token with which w better keys compete
  std::int32_t*
      arrivals_;  // [pending]: the slot of the key that begins to compete with a token, -1 for none
};

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
  const std::int64_t slots = cache.shape.places() + cache.pending;
  const auto queries = static_cast<std::int32_t>(args.seqlen_q);
  const auto first_query = static_cast<std::int32_t>(cache.pending - args.seqlen_q);
  for_each_row(cache, execution, [&](const Row& row, int worker) {
    const Competition competition(row, cache.pending, scratch_of(cache, execution, worker));
    KeyInterval* const intervals = args.intervals + row.index * slots;
    for (std::int64_t slot = 0; slot < slots; ++slot) {
      intervals[slot] = {0, 0};
      const bool is_taken = slot < row.count.count || slot >= row.places;
      if (!is_taken || row.entries[slot] == no_key) continue;
      const auto token = static_cast<std::int32_t>(slot - row.places);
      const std::int32_t first = std::max(token - first_query, 0);
      const std::int32_t last = std::min(competition.end_of(slot) - first_query, queries);
      if (first < last) intervals[slot] = {first, last};
    }
  });
}

void commit(const CommitArgs& args, const Execution& execution) {
  const KvCache& cache = args.cache;
  const auto kept = [&](std::int64_t b) {
    return args.keep == nullptr ? cache.pending : args.keep[b];
  };
  for_each_row(cache, execution, [&](const Row& row, int worker) {
    const auto tokens = static_cast<std::int32_t>(kept(row.b));
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
  for (std::int64_t b = 0; b < cache.shape.batch; ++b) {
    cache.seen[b] += static_cast<std::int32_t>(kept(b));
  }
}

// ---- Prefill -------------------------------------------------------------------------------------

// Stores the keys that the last token of a row sees, in their order, and counts those that have competed. The first of
// them are the sinks.
void store_survivors(const FillArgs& args, const Row& row, std::int32_t length) {
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
    row.put(slots.count++, row.token(args.k, j), row.token(args.v, j), score,
            is_admitted ? j : ~j);
  }
  // All that have competed are chosen while they are no more than w. Others here are masked keys of which no mask tells.
  if (stored < rule.window) slots.competed = stored;
}

// Where recent keys compete, w better ones may have beaten some that stay visible.
void mark_beaten(const Row& row) {
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
  for_each_row(args.cache, execution, [&](const Row& row, int) {
    const auto length =
        args.lengths == nullptr ? static_cast<std::int32_t>(args.seqlen_k) : args.lengths[row.b];
    row.count = {};
    store_survivors(args, row, length);
    if (!row.rule.delayed && row.rule.recent > 0) mark_beaten(row);
    row.find_victim(length);
    row.find_leaving(length);
  });
  for (std::int64_t b = 0; b < args.cache.shape.batch; ++b) {
    args.cache.seen[b] =
        args.lengths == nullptr ? static_cast<std::int32_t>(args.seqlen_k) : args.lengths[b];
  }
}

// ---- Decoding ------------------------------------------------------------------------------------

// Stores the new token where it is visible, and empties or marks the slots of keys that no longer are.
void insert(const DecodeStepArgs& args, const Row& row) {
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
  forward.problem = pending_problem(args.cache, args.heads_q, 1, args.scale, args.score_use);
  forward.problem.intervals_shape = {};
  forward.problem.softcap = args.softcap;
  forward.problem.nonfinite = args.nonfinite;
  forward.in = pending_inputs(args.cache, args.q, 1, nullptr, args.score_use);
  forward.out = args.out;
  forward.lse = args.lse;
  return forward;
}

Slots slots_of(const KvCache& cache) {
  return {cache.counts,       cache.scores, cache.positions, cache.seen, delay_of(cache.shape.keep),
          cache.shape.slots()};
}

struct DecodeStepCall {
  ForwardCall attention;
  std::size_t bytes;

  DecodeStepCall(const DecodeStepArgs& args, const Execution& execution)
      : attention(checked(args), execution, slots_of(args.cache)), bytes(attention.bytes) {}

  void run(const DecodeStepArgs& args, const Execution& execution) const {
    // A single thread writes a few rows faster than other threads wake up.
    constexpr std::int64_t few = 64;
    Execution inserting = execution;
    if (rows_of(args.cache) <= few) inserting.workers = 1;
    for_each_row(args.cache, inserting, [&](const Row& row, int) { insert(args, row); });
    for (std::int64_t b = 0; b < args.cache.shape.batch; ++b) ++args.cache.seen[b];
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
    .find_kernels = [](const KvCacheShape&, std::string&) { return kernel_set(); },
    .clear = clear,
    .copy_rows = copy_rows,
    .fill = fill,
    .append = append,
    .plan_pending_intervals =
        make_plan<DirectCall<PendingIntervalsArgs, scratch_workspace<PendingIntervalsArgs>,
                             pending_intervals>,
                  PendingIntervalsArgs, Execution>,
    .plan_commit = make_plan<DirectCall<CommitArgs, scratch_workspace<CommitArgs>, commit>,
                             CommitArgs, Execution>,
    .plan_decode_step =
        [](const KernelSet&, const DecodeStepArgs& args, const Execution& execution,
           Plan<DecodeStepArgs>& plan) { make_plan<DecodeStepCall>(args, execution, plan); },
};

}  // namespace flash_dmattn::cpu
