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
  SlotCount& count;
  float* scores;
  std::int32_t* positions;

  Row(const KvCache& c, std::int64_t index_)
      : cache(c),
        b(index_ / c.shape.heads_kv),
        h(index_ % c.shape.heads_kv),
        index(index_),
        count(c.counts[index]),
        scores(c.scores + index * c.shape.slots()),
        positions(c.positions + index * c.shape.slots()) {}

  std::int64_t window() const { return cache.shape.window; }

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

  void put(std::int64_t slot, const char* k, const char* v, float score,
           std::int32_t position) const {
    const auto bytes = static_cast<std::size_t>(cache.shape.head_dim * size_of(cache.shape.dtype));
    std::memcpy(address(cache.k, slot), k, bytes);
    std::memcpy(address(cache.v, slot), v, bytes);
    scores[slot] = score;
    positions[slot] = position;
  }

  // Copies a slot of `from`, which may be this row.
  void copy(std::int64_t slot, const Row& from, std::int64_t source) const {
    put(slot, from.address(from.cache.k, source), from.address(from.cache.v, source),
        from.scores[source], from.positions[source]);
  }

  NarrowRank rank(std::int64_t slot) const { return rank_of(scores[slot], positions[slot]); }

  void find_victim() const {
    std::int32_t worst = 0;
    for (std::int32_t slot = 1; slot < count.count; ++slot) {
      if (rank(slot) < rank(worst)) worst = slot;
    }
    count.victim = worst;
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
    row.count = {0, 0};
    for (std::int64_t slot = 0; slot < cache.shape.slots(); ++slot) {
      std::memset(row.address(cache.k, slot), 0, bytes);
      std::memset(row.address(cache.v, slot), 0, bytes);
    }
    std::fill_n(row.scores, cache.shape.slots(), 0.0f);
    std::fill_n(row.positions, cache.shape.slots(), 0);
  });
  std::fill_n(cache.seen, cache.shape.batch, 0);
}

void copy_rows(const CopyRowsArgs& args, const Execution& execution) {
  for_each_row(args.to, execution, [&](const Row& to, int) {
    const Row from(args.from, args.index[to.b] * args.from.shape.heads_kv + to.h);
    to.count = from.count;
    for (std::int64_t slot = 0; slot < from.count.count; ++slot) to.copy(slot, from, slot);
    const std::int64_t end = from.window() + args.from.pending;
    for (std::int64_t slot = from.window(); slot < end; ++slot) to.copy(slot, from, slot);
  });
  for (std::int64_t b = 0; b < args.to.shape.batch; ++b) {
    args.to.seen[b] = args.from.seen[args.index[b]];
  }
}

void fill(const FillArgs& args, const Execution& execution) {
  for_each_row(args.cache, execution, [&](const Row& row, int) {
    const KeyInterval* const intervals = args.intervals.data + row.b * args.intervals.stride_batch +
                                         row.h * args.intervals.stride_head;
    const std::int64_t length = args.lengths == nullptr ? args.seqlen_k : args.lengths[row.b];
    row.count = {0, 0};
    for (std::int64_t j = 0; j < length && row.count.count < row.window(); ++j) {
      const bool survives =
          intervals[j].first < intervals[j].last && intervals[j].last >= args.seqlen_q;
      const float score = row.token_score(args.scores, j);
      if (!survives || std::isnan(score)) continue;
      row.put(row.count.count++, row.token(args.k, j), row.token(args.v, j), score,
              static_cast<std::int32_t>(j));
    }
    row.find_victim();
  });
  for (std::int64_t b = 0; b < args.cache.shape.batch; ++b) {
    args.cache.seen[b] =
        args.lengths == nullptr ? static_cast<std::int32_t>(args.seqlen_k) : args.lengths[b];
  }
}

bool is_masked(const TokenMask& mask, std::int64_t b, std::int64_t t) {
  return mask.data != nullptr && mask.data[b * mask.stride[0] + t * mask.stride[1]] == 0;
}

void append(const AppendArgs& args, const Execution& execution) {
  for_each_row(args.cache, execution, [&](const Row& row, int) {
    for (std::int64_t t = 0; t < args.seqlen; ++t) {
      const std::int64_t place = args.cache.pending + t;
      const float score = is_masked(args.mask, row.b, t) ? std::numeric_limits<float>::quiet_NaN()
                                                         : row.token_score(args.scores, t);
      row.put(row.window() + place, row.token(args.k, t), row.token(args.v, t), score,
              static_cast<std::int32_t>(args.cache.seen[row.b] + place));
    }
  });
}

// ---- Chunks --------------------------------------------------------------------------------------

// The best keys of a row, at most w of them, while pending tokens are added one by one.
class BestKeys {
 public:
  struct Key {
    NarrowRank rank;
    std::int64_t slot;
    friend bool operator<(const Key& a, const Key& b) { return a.rank < b.rank; }
    friend bool operator>(const Key& a, const Key& b) { return a.rank > b.rank; }
  };
  static constexpr std::int64_t none = -1;

  BestKeys(const Row& row, Key* memory) : row_(row), keys_(memory) {
    for (std::int64_t slot = 0; slot < row.count.count; ++slot) add(slot);
  }

  // Adds the key in `slot`. Returns the slot of the key that leaves, possibly `slot` itself, or none if there was room.
  std::int64_t add(std::int64_t slot) {
    if (std::isnan(row_.scores[slot])) return slot;
    const Key key{row_.rank(slot), slot};
    if (size_ < row_.window()) {
      keys_[size_++] = key;
      if (is_full()) std::make_heap(keys_, keys_ + size_, std::greater<>());
      return none;
    }
    if (key < keys_[0]) return slot;
    const std::int64_t leaving = keys_[0].slot;
    replace_top(keys_, size_, key);
    return leaving;
  }

  std::int64_t size() const { return size_; }
  bool is_full() const { return size_ == row_.window(); }
  Key* begin() const { return keys_; }  // the worst key comes first once the heap is full
  Key* end() const { return keys_ + size_; }

 private:
  const Row& row_;
  Key* keys_;
  std::int64_t size_ = 0;
};

// The size of a worker's BestKeys and of a flag for each slot.
std::size_t scratch_bytes(const KvCacheShape& s) {
  const auto slots = static_cast<std::size_t>(s.window);
  return align_up(slots * sizeof(BestKeys::Key)) + align_up(slots);
}

std::size_t scratch_of_workers(const KvCache& cache, const Execution& execution) {
  const std::int64_t workers = std::min<std::int64_t>(execution.workers, rows_of(cache));
  return static_cast<std::size_t>(workers) * scratch_bytes(cache.shape);
}

BestKeys::Key* key_memory(const KvCache& cache, const Execution& execution, int worker) {
  auto* const scratch = static_cast<char*>(execution.workspace) +
                        static_cast<std::size_t>(worker) * scratch_bytes(cache.shape);
  return reinterpret_cast<BestKeys::Key*>(scratch);
}

void pending_intervals(const PendingIntervalsArgs& args, const Execution& execution) {
  const std::int64_t keys = args.cache.shape.window + args.cache.pending;
  const auto end = static_cast<std::int32_t>(args.seqlen_q);
  for_each_row(args.cache, execution, [&](const Row& row, int worker) {
    KeyInterval* const intervals = args.intervals + row.index * keys;
    std::fill_n(intervals, keys, KeyInterval{0, 0});
    std::fill_n(intervals, row.count.count, KeyInterval{0, end});
    BestKeys best(row, key_memory(args.cache, execution, worker));
    for (std::int64_t slot = row.window(); slot < keys; ++slot) {
      // The first query that sees the key is also the first that no longer sees the key it replaces.
      const auto first = static_cast<std::int32_t>(std::max<std::int64_t>(slot - (keys - end), 0));
      const std::int64_t leaving = best.add(slot);
      if (leaving == slot) continue;
      intervals[slot] = {first, end};
      if (leaving == BestKeys::none) continue;
      KeyInterval& beaten = intervals[leaving];
      beaten = beaten.first < first ? KeyInterval{beaten.first, first} : KeyInterval{0, 0};
    }
  });
}

void commit(const CommitArgs& args, const Execution& execution) {
  const KvCache& cache = args.cache;
  const auto kept = [&](std::int64_t b) {
    return args.keep == nullptr ? cache.pending : args.keep[b];
  };
  for_each_row(cache, execution, [&](const Row& row, int worker) {
    BestKeys::Key* const memory = key_memory(cache, execution, worker);
    BestKeys best(row, memory);
    for (std::int64_t t = 0; t < kept(row.b); ++t) best.add(row.window() + t);
    // Pending keys among the best take the slots of keys that are no longer among the best.
    auto* const stays = reinterpret_cast<char*>(memory) +
                        align_up(static_cast<std::size_t>(row.window()) * sizeof(BestKeys::Key));
    std::memset(stays, 0, static_cast<std::size_t>(row.window()));
    for (const BestKeys::Key& key : best) {
      if (key.slot < row.window()) stays[key.slot] = 1;
    }
    std::int64_t place = 0;
    for (BestKeys::Key& key : best) {
      if (key.slot < row.window()) continue;
      while (stays[place] != 0) ++place;
      row.copy(place, row, key.slot);
      key.slot = place++;
    }
    row.count.count = static_cast<std::int32_t>(best.size());
    if (best.is_full()) row.count.victim = static_cast<std::int32_t>(best.begin()->slot);
  });
  for (std::int64_t b = 0; b < cache.shape.batch; ++b) {
    cache.seen[b] += static_cast<std::int32_t>(kept(b));
  }
}

// ---- Decoding ------------------------------------------------------------------------------------

// Puts the new token in a free slot or in the victim's slot, unless the victim is better.
void insert(const DecodeStepArgs& args, const Row& row) {
  const float score = row.token_score(args.scores, 0);
  const std::int32_t position = args.cache.seen[row.b];
  if (is_masked(args.mask, row.b, 0) || std::isnan(score)) return;
  std::int32_t slot = row.count.victim;
  if (row.count.count < row.window()) {
    slot = row.count.count++;
  } else if (rank_of(score, position) < row.rank(slot)) {
    return;
  }
  row.put(slot, row.token(args.k, 0), row.token(args.v, 0), score, position);
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
  return {cache.counts, cache.scores, cache.positions, cache.shape.slots()};
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
