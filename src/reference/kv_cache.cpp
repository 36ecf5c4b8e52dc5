#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "arguments.h"
#include "flash_dmattn/calls.h"
#include "plan.h"
#include "reference/kernels.h"

// The KV cache as plain loops: tokens enter one after the other, and the worst key is searched for each.
namespace flash_dmattn::reference {
namespace {

// The slots of a (batch, kv head).
struct Row {
  const KvCache& cache;
  std::int64_t b, h;

  std::int64_t index() const { return b * cache.shape.heads_kv + h; }
  SlotCount& count() const { return cache.counts[index()]; }
  float& score(std::int64_t slot) const {
    return cache.scores[index() * cache.shape.slots() + slot];
  }
  std::int32_t& position(std::int64_t slot) const {
    return cache.positions[index() * cache.shape.slots() + slot];
  }
  char* address(const Tensor4& t, std::int64_t slot) const {
    const std::int64_t at = b * t.stride[0] + h * t.stride[1] + slot * t.stride[2];
    return static_cast<char*>(t.data) + at * size_of(cache.shape.dtype);
  }
  std::size_t bytes() const {
    return static_cast<std::size_t>(cache.shape.head_dim * size_of(cache.shape.dtype));
  }

  bool beats(std::int64_t slot, std::int64_t other) const {
    return score(slot) > score(other) ||
           (score(slot) == score(other) && position(slot) > position(other));
  }

  void find_victim() const {
    std::int32_t worst = 0;
    for (std::int32_t slot = 1; slot < count().count; ++slot) {
      if (beats(worst, slot)) worst = slot;
    }
    count().victim = worst;
  }

  void put(std::int64_t slot, const char* k, const char* v, float s, std::int32_t at) const {
    std::memcpy(address(cache.k, slot), k, bytes());
    std::memcpy(address(cache.v, slot), v, bytes());
    score(slot) = s;
    position(slot) = at;
  }

  // A token competes for a slot.
  void insert(const char* k, const char* v, float s, std::int32_t at) const {
    if (std::isnan(s)) return;
    SlotCount& slots = count();
    if (slots.count < cache.shape.window) {
      put(slots.count++, k, v, s, at);
    } else if (s > score(slots.victim) ||
               (s == score(slots.victim) && at > position(slots.victim))) {
      put(slots.victim, k, v, s, at);
    }
    find_victim();
  }
};

template <class Body>
void for_each_row(const KvCache& cache, const Body& body) {
  for (std::int64_t b = 0; b < cache.shape.batch; ++b) {
    for (std::int64_t h = 0; h < cache.shape.heads_kv; ++h) body(Row{cache, b, h});
  }
}

// Token t of [B, S, Hkv, D].
const char* token(const ConstTensor4& tensor, const Row& row, std::int64_t t) {
  const std::int64_t at =
      row.b * tensor.stride[0] + t * tensor.stride[1] + row.h * tensor.stride[2];
  return static_cast<const char*>(tensor.data) + at * size_of(row.cache.shape.dtype);
}

// NaN for a masked token.
float score_of(const ScoreRows& scores, const TokenMask& mask, const Row& row, std::int64_t t) {
  if (mask.data != nullptr && mask.data[row.b * mask.stride[0] + t * mask.stride[1]] == 0) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  return scores.data[row.b * scores.stride[0] + row.h * scores.stride[1] + t * scores.stride[2]];
}

void clear(const KvCache& cache, const Execution&) {
  for_each_row(cache, [](const Row& row) {
    row.count() = {0, 0};
    for (std::int64_t slot = 0; slot < row.cache.shape.slots(); ++slot) {
      row.score(slot) = 0;
      row.position(slot) = 0;
      std::memset(row.address(row.cache.k, slot), 0, row.bytes());
      std::memset(row.address(row.cache.v, slot), 0, row.bytes());
    }
  });
  std::fill_n(cache.seen, cache.shape.batch, 0);
}

void copy_rows(const CopyRowsArgs& args, const Execution&) {
  const std::int64_t window = args.to.shape.window;
  for_each_row(args.to, [&](const Row& to) {
    const Row from{args.from, args.index[to.b], to.h};
    to.count() = from.count();
    const auto copy = [&](std::int64_t slot) {
      to.put(slot, from.address(args.from.k, slot), from.address(args.from.v, slot),
             from.score(slot), from.position(slot));
    };
    for (std::int64_t slot = 0; slot < from.count().count; ++slot) copy(slot);
    for (std::int64_t slot = window; slot < window + args.from.pending; ++slot) copy(slot);
  });
  for (std::int64_t b = 0; b < args.to.shape.batch; ++b) {
    args.to.seen[b] = args.from.seen[args.index[b]];
  }
}

void fill(const FillArgs& args, const Execution&) {
  const KeyIntervals& intervals = args.intervals;
  for_each_row(args.cache, [&](const Row& row) {
    row.count() = {0, 0};
    const std::int64_t length = args.lengths == nullptr ? args.seqlen_k : args.lengths[row.b];
    for (std::int64_t j = 0; j < length; ++j) {
      const KeyInterval interval =
          intervals.data[row.b * intervals.stride_batch + row.h * intervals.stride_head + j];
      if (interval.first >= interval.last || interval.last < args.seqlen_q) continue;
      row.insert(token(args.k, row, j), token(args.v, row, j), score_of(args.scores, {}, row, j),
                 static_cast<std::int32_t>(j));
    }
  });
  for (std::int64_t b = 0; b < args.cache.shape.batch; ++b) {
    args.cache.seen[b] =
        args.lengths == nullptr ? static_cast<std::int32_t>(args.seqlen_k) : args.lengths[b];
  }
}

void append(const AppendArgs& args, const Execution&) {
  for_each_row(args.cache, [&](const Row& row) {
    for (std::int64_t t = 0; t < args.seqlen; ++t) {
      const std::int64_t place = args.cache.pending + t;
      row.put(args.cache.shape.window + place, token(args.k, row, t), token(args.v, row, t),
              score_of(args.scores, args.mask, row, t),
              static_cast<std::int32_t>(args.cache.seen[row.b] + place));
    }
  });
}

// By the definition: for every query, the slots that fewer than w of the keys that it may see beat.
void pending_intervals(const PendingIntervalsArgs& args, const Execution&) {
  const std::int64_t window = args.cache.shape.window;
  const std::int64_t keys = window + args.cache.pending;
  for_each_row(args.cache, [&](const Row& row) {
    KeyInterval* const intervals = args.intervals + row.index() * keys;
    std::fill_n(intervals, keys, KeyInterval{0, 0});
    for (std::int64_t i = 0; i < args.seqlen_q; ++i) {
      const std::int64_t last = keys - args.seqlen_q + i;  // the slot of the query's own key
      const auto may_see = [&](std::int64_t slot) {
        return (slot < row.count().count || (slot >= window && slot <= last)) &&
               !std::isnan(row.score(slot));
      };
      for (std::int64_t slot = 0; slot < keys; ++slot) {
        if (!may_see(slot)) continue;
        std::int64_t beaten_by = 0;
        for (std::int64_t other = 0; other < keys; ++other) {
          beaten_by += may_see(other) && row.beats(other, slot) ? 1 : 0;
        }
        if (beaten_by >= window) continue;
        const auto query = static_cast<std::int32_t>(i);
        if (intervals[slot].last == 0) intervals[slot].first = query;
        intervals[slot].last = query + 1;
      }
    }
  });
}

void commit(const CommitArgs& args, const Execution&) {
  const std::int64_t window = args.cache.shape.window;
  const auto kept = [&](std::int64_t b) {
    return args.keep == nullptr ? args.cache.pending : args.keep[b];
  };
  for_each_row(args.cache, [&](const Row& row) {
    for (std::int64_t slot = window; slot < window + kept(row.b); ++slot) {
      row.insert(row.address(args.cache.k, slot), row.address(args.cache.v, slot), row.score(slot),
                 row.position(slot));
    }
  });
  for (std::int64_t b = 0; b < args.cache.shape.batch; ++b) {
    args.cache.seen[b] += static_cast<std::int32_t>(kept(b));
  }
}

// ---- Decoding ------------------------------------------------------------------------------------

std::size_t intervals_bytes(const KvCacheShape& s) {
  const auto intervals = static_cast<std::size_t>(s.batch * s.heads_kv * s.window);
  return align_up(intervals * sizeof(KeyInterval));
}

ForwardArgs attention_of(const DecodeStepArgs& args, const KeyInterval* intervals) {
  ForwardArgs forward;
  forward.problem = pending_problem(args.cache, args.heads_q, 1, args.scale, args.score_use);
  forward.problem.softcap = args.softcap;
  forward.problem.nonfinite = args.nonfinite;
  forward.in = pending_inputs(args.cache, args.q, 1, intervals, args.score_use);
  forward.out = args.out;
  forward.lse = args.lse;
  return forward;
}

// The intervals [B, Hkv, w] of the slots, then the workspace of attention.
struct DecodeStepCall {
  std::size_t bytes;

  DecodeStepCall(const DecodeStepArgs& args, const Execution& execution)
      : bytes(intervals_bytes(args.cache.shape) +
              attention(args, &some_intervals, execution).workspace_size()) {}

  void run(const DecodeStepArgs& args, const Execution& execution) const {
    const KvCacheShape& s = args.cache.shape;
    auto* const intervals = static_cast<KeyInterval*>(execution.workspace);
    for_each_row(args.cache, [&](const Row& row) {
      row.insert(token(args.k, row, 0), token(args.v, row, 0),
                 score_of(args.scores, args.mask, row, 0), args.cache.seen[row.b]);
      for (std::int64_t slot = 0; slot < s.window; ++slot) {
        intervals[row.index() * s.window + slot] = {0, slot < row.count().count ? 1 : 0};
      }
    });
    for (std::int64_t b = 0; b < s.batch; ++b) ++args.cache.seen[b];
    const std::size_t used = intervals_bytes(s);
    attention(args, intervals, execution)
        .run({static_cast<std::byte*>(execution.workspace) + used,
              execution.workspace_bytes - used});
  }

 private:
  static constexpr KeyInterval some_intervals{};

  static ForwardCall attention(const DecodeStepArgs& args, const KeyInterval* intervals,
                               const Execution& execution) {
    return ForwardCall(attention_of(args, intervals), execution, "reference");
  }
};

}  // namespace

const KvBackend kv_backend = {
    .find_kernels = [](const KvCacheShape&, std::string&) { return kernel_set(); },
    .clear = clear,
    .copy_rows = copy_rows,
    .fill = fill,
    .append = append,
    .plan_pending_intervals = make_plan<
        DirectCall<PendingIntervalsArgs, no_workspace<PendingIntervalsArgs>, pending_intervals>,
        PendingIntervalsArgs, Execution>,
    .plan_commit =
        make_plan<DirectCall<CommitArgs, no_workspace<CommitArgs>, commit>, CommitArgs, Execution>,
    .plan_decode_step =
        [](const KernelSet&, const DecodeStepArgs& args, const Execution& execution,
           Plan<DecodeStepArgs>& plan) { make_plan<DecodeStepCall>(args, execution, plan); },
};

}  // namespace flash_dmattn::reference
