#include "api/validate_kv_cache.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "api/validate.h"
#include "common/arguments.h"
#include "common/kv_cache/step.h"
#include "common/kv_cache/views.h"

namespace flash_dmattn {
namespace {

// The names of a cache's members in errors.
struct CacheNames {
  std::string_view k, v, scores, positions, counts, seen, pending, rows;
};
constexpr CacheNames cache_names = {"cache.k",         "cache.v",      "cache.scores",
                                    "cache.positions", "cache.counts", "cache.seen",
                                    "cache.pending",   "cache.rows"};
constexpr CacheNames from_names = {"from.k",      "from.v",    "from.scores",  "from.positions",
                                   "from.counts", "from.seen", "from.pending", "from.rows"};
constexpr CacheNames to_names = {"to.k",      "to.v",    "to.scores",  "to.positions",
                                 "to.counts", "to.seen", "to.pending", "to.rows"};

// The rows of the arrays, with the strides of dense arrays where none are given.
CacheRows resolved_rows(const KvCache& cache, std::string_view name) {
  const KvCacheShape& s = cache.shape;
  CacheRows rows = cache.rows;
  // Called only for errors, because building the name allocates memory.
  const auto member = [&](std::string_view of) { return std::string(name).append(".").append(of); };
  if (rows.index == nullptr) {
    rows.count = s.batch;
  } else if (!product_fits({rows.count, s.total_slots(), s.head_dim})) {
    require_length(member("count"), rows.count);
    throw InvalidArgument(member("count"), std::to_string(rows.count),
                          "arrays of at most 2^56 elements");
  }
  const auto resolve = [&](std::string_view stride_name, std::int64_t& stride, std::int64_t dense,
                           std::int64_t count) {
    if (stride == dense_stride) stride = dense;
    if (count < 2 || (dense <= stride && stride <= max_elements / count)) return;
    require_range(member(stride_name), stride, dense, max_elements / count);
  };
  resolve("index_stride", rows.index_stride, 1, rows.index == nullptr ? 0 : s.batch);
  resolve("slot_stride", rows.slot_stride, s.total_slots(), rows.count);
  resolve("count_stride", rows.count_stride, s.heads_kv, rows.count);
  resolve("seen_stride", rows.seen_stride, 1, rows.count);
  return rows;
}

bool has_dense_rows(const KvCache& cache) {
  const KvCacheShape& s = cache.shape;
  const CacheRows& rows = cache.rows;
  return rows.index == nullptr &&
         (s.batch < 2 || (rows.slot_stride == s.total_slots() && rows.count_stride == s.heads_kv &&
                          rows.seen_stride == 1));
}

KvCache with_rows(const KvCache& cache, const CacheNames& names) {
  const KvCacheShape& s = cache.shape;
  check_shape(s);
  KvCache result = cache;
  result.rows = resolved_rows(cache, names.rows);
  const bool equal = s.has_equal_heads();
  const std::int64_t heads = equal ? s.heads_kv : 1;
  const std::int64_t slots = equal ? s.slots(0) : s.total_slots();
  check_output(names.k, cache.k, {result.rows.count, heads, slots, s.head_dim});
  check_output(names.v, cache.v, {result.rows.count, heads, slots, value_dim_of(s)});
  if (!equal) result.k.stride[1] = result.v.stride[1] = 0;
  require_pointer(names.scores, cache.scores, has_rows(s));
  require_pointer(names.positions, cache.positions, has_rows(s));
  require_pointer(names.counts, cache.counts, has_rows(s));
  require_pointer(names.seen, cache.seen, s.batch > 0);
  require_range(names.pending, cache.pending, 0, s.chunk);
  if (result.rows.index != nullptr) require_range(names.pending, cache.pending, 0, 0);
  return result;
}

// Values that a GPU's callers keep on the device are only read on the CPU.
void check_values(std::string_view argument, const KvCacheShape& s, const std::int32_t* values,
                  std::int64_t count, std::int64_t most) {
  if (values == nullptr || s.device != Device::cpu) return;
  for (std::int64_t i = 0; i < count; ++i) {
    if (values[i] >= 0 && values[i] <= most) continue;
    throw InvalidArgument(std::string(argument) + "[" + std::to_string(i) + "]",
                          std::to_string(values[i]), "0 to " + std::to_string(most));
  }
}

// The cache as backends see it. Negative rows belong to no sequence.
KvCache validated_as(const KvCache& cache, const CacheNames& names) {
  const KvCache result = with_rows(cache, names);
  const CacheRows& rows = result.rows;
  if (rows.index == nullptr || cache.shape.device != Device::cpu) return result;
  for (std::int64_t b = 0; b < cache.shape.batch; ++b) {
    const std::int64_t row = row_of(result, b);
    if (row < rows.count) continue;
    throw InvalidArgument(std::string(names.rows) + ".index[" + std::to_string(b) + "]",
                          std::to_string(row),
                          "a row before " + std::to_string(rows.count) + ", or a negative number");
  }
  return result;
}

void require_dense_rows(const KvCache& cache, const CacheNames& names) {
  if (has_dense_rows(cache)) return;
  throw InvalidArgument(names.rows, cache.rows.index == nullptr ? "strides" : "an index",
                        "dense rows without an index; copy_rows makes them");
}

ScoreRows validated_scores(const KvCacheShape& s, const ScoreRows& scores, std::int64_t length) {
  require_pointer("scores", scores.data, has_rows(s) && length > 0);
  return {scores.data, resolved_strides(scores.stride, {s.batch, s.heads_kv, length})};
}

TokenMask validated_mask(const KvCacheShape& s, const TokenMask& mask, std::int64_t length) {
  return {mask.data, resolved_strides(mask.stride, {s.batch, length})};
}

// k and v of new tokens.
void check_tokens(const KvCacheShape& s, const ConstTensor4& k, const ConstTensor4& v,
                  std::int64_t length) {
  require_length("seqlen", length);
  check_input("k", k, {s.batch, length, s.heads_kv, s.head_dim});
  check_input("v", v, {s.batch, length, s.heads_kv, value_dim_of(s)});
}

// The rule of a cache. Its memory has to be known.
void check_rule(const KvCacheShape& s) {
  const SelectionRule& rule = s.rule;
  if (rule.window == every_key) {
    throw InvalidArgument("cache.shape.rule.window", "every_key",
                          "a number of keys, with a threshold the most that it may show");
  }
  require_length("cache.shape.rule.window", rule.window);
  require_length("cache.shape.rule.recent_window", rule.recent_window);
  require_length("cache.shape.rule.sink_tokens", rule.sink_tokens);
  const std::int64_t most = rule.sink_tokens + rule.window + rule.recent_window;
  if (most < 1) {
    throw InvalidArgument("cache.shape.rule.window", "0",
                          "at least 1 where there are no recent keys and no sinks");
  }
  require_length("cache.shape.rule.sink_tokens + window + recent_window", most);
  if (rule.selection != Selection::per_query) {
    throw InvalidArgument("cache.shape.rule.selection",
                          std::to_string(static_cast<int>(rule.selection)),
                          "per_query: under another one keys that were evicted return");
  }
  if (std::isnan(rule.score_threshold)) {
    throw InvalidArgument("cache.shape.rule.score_threshold", "NaN", "a number, or -inf for none");
  }
  for (std::int64_t h = 0; rule.head_windows != nullptr && h < s.heads_kv; ++h) {
    require_range("cache.shape.rule.head_windows[" + std::to_string(h) + "]", rule.head_windows[h],
                  0, rule.window);
  }
}

}  // namespace

void check_shape(const KvCacheShape& s) {
  require_length("cache.shape.batch", s.batch);
  require_length("cache.shape.heads_kv", s.heads_kv);
  check_rule(s);
  require_length("cache.shape.chunk", s.chunk);
  require_length("cache.shape.most_places() + chunk", s.most_places() + s.chunk);
  require_range("cache.shape.head_dim", s.head_dim, 1, 256);
  require_range("cache.shape.value_dim", value_dim_of(s), 1, s.head_dim);
  if (s.dtype > DType::f16) {
    throw InvalidArgument("cache.shape.dtype", name_of(s.dtype), "f32, bf16 or f16");
  }
  if (s.device > Device::cuda) {
    throw InvalidArgument("cache.shape.device", std::to_string(static_cast<int>(s.device)),
                          "cpu or cuda");
  }
  if (!product_fits({s.batch, s.total_slots(), s.head_dim})) {
    throw InvalidArgument("cache.shape",
                          std::to_string(s.batch) + " rows of " + std::to_string(s.heads_kv) +
                              " heads with " + std::to_string(s.total_slots()) + " slots in all",
                          "at most 2^56 elements");
  }
}

KvCache validated(const KvCache& cache) { return validated_as(cache, cache_names); }

namespace {

// Checks a cache whose content is read: counts of another rule, or of memory without clear_cache, would be read as slots
// that do not exist. On the CPU only, because a GPU's callers keep them on the device. `name` is the argument in errors.
void check_counts(const KvCache& cache, std::string_view name = "cache.counts") {
  const KvCacheShape& s = cache.shape;
  if (s.device != Device::cpu) return;
  for (std::int64_t i = 0; i < s.batch * s.heads_kv; ++i) {
    const std::int64_t b = i / s.heads_kv;
    const std::int64_t row = row_of(cache, b);
    if (row < 0) continue;
    const SlotCount& slots = cache.counts[row * cache.rows.count_stride + i % s.heads_kv];
    const auto check = [&](std::string_view member, std::int64_t value, std::int64_t least,
                           std::int64_t most) {
      if (value >= least && value <= most) return;
      throw InvalidArgument(
          std::string(name) + "[" + std::to_string(row * s.heads_kv + i % s.heads_kv) + "]." +
              std::string(member),
          std::to_string(value), std::to_string(least) + " to " + std::to_string(most));
    };
    const std::int64_t h = i % s.heads_kv;
    const std::int64_t last = std::max<std::int64_t>(s.places(h) - 1, 0);
    const std::int64_t window = s.window(h);
    check("count", slots.count, 0, s.places(h));
    check("competed", slots.competed, 0, std::numeric_limits<std::int32_t>::max());
    check("free", slots.free, 0, slots.count);
    check("leaving", slots.leaving, -1, last);
    if (slots.competed >= window) check("victim", slots.victim, 0, last);
  }
}

}  // namespace

CopyRowsArgs validated(const CopyRowsArgs& args) {
  CopyRowsArgs result = args;
  result.from = with_rows(args.from, from_names);
  result.to = validated_as(args.to, to_names);
  if (args.from.rows.index != nullptr) {
    throw InvalidArgument("from.rows.index", "rows", "null: `index` has the rows");
  }
  const KvCacheShape& from = args.from.shape;
  const KvCacheShape& to = args.to.shape;
  const auto same = [](std::string_view field, std::int64_t got, std::int64_t expected) {
    require_range(field, got, expected, expected);
  };
  same("to.shape.heads_kv", to.heads_kv, from.heads_kv);
  same("to.shape.rule.window", to.rule.window, from.rule.window);
  for (std::int64_t h = 0; h < from.heads_kv; ++h) {
    if (to.window(h) == from.window(h)) continue;
    same("to.shape.rule.head_windows[" + std::to_string(h) + "]", to.window(h), from.window(h));
  }
  same("to.shape.rule.recent_window", to.rule.recent_window, from.rule.recent_window);
  same("to.shape.rule.sink_tokens", to.rule.sink_tokens, from.rule.sink_tokens);
  same("to.shape.rule.recent_competes", to.rule.recent_competes, from.rule.recent_competes);
  if (to.rule.score_threshold != from.rule.score_threshold) {
    throw InvalidArgument("to.shape.rule.score_threshold", std::to_string(to.rule.score_threshold),
                          std::to_string(from.rule.score_threshold));
  }
  same("to.shape.head_dim", to.head_dim, from.head_dim);
  same("to.shape.value_dim", value_dim_of(to), value_dim_of(from));
  same("to.shape.dtype", static_cast<int>(to.dtype), static_cast<int>(from.dtype));
  same("to.shape.device", static_cast<int>(to.device), static_cast<int>(from.device));
  same("to.pending", args.to.pending, args.from.pending);
  require_pointer("index", args.index, to.batch > 0);
  check_values("index", to, args.index, to.batch, from.batch - 1);
  check_counts(result.from, "from.counts");
  return result;
}

FillArgs validated(const FillArgs& args) {
  FillArgs result = args;
  result.cache = validated(args.cache);
  const KvCacheShape& s = args.cache.shape;
  require_length("seqlen_q", args.seqlen_q);
  check_tokens(s, args.k, args.v, args.seqlen_k);
  require_pointer("intervals", args.intervals.data, has_rows(s) && args.seqlen_k > 0);
  check_values("lengths", s, args.lengths, s.batch, args.seqlen_k);
  result.scores = validated_scores(s, args.scores, args.seqlen_k);
  result.mask = validated_mask(s, args.mask, args.seqlen_k);
  result.intervals = with_resolved_strides(args.intervals, s.batch, s.heads_kv, args.seqlen_k);
  return result;
}

AppendArgs validated(const AppendArgs& args) {
  AppendArgs result = args;
  result.cache = validated(args.cache);
  require_dense_rows(result.cache, cache_names);
  const KvCacheShape& s = args.cache.shape;
  check_tokens(s, args.k, args.v, args.seqlen);
  const std::int64_t room = s.chunk - args.cache.pending;
  if (args.seqlen > room) {
    throw InvalidArgument("seqlen", std::to_string(args.seqlen),
                          "at most " + std::to_string(room) + ": cache.shape.chunk has room for " +
                              std::to_string(s.chunk) + " pending tokens, of which " +
                              std::to_string(args.cache.pending) + " are taken");
  }
  result.scores = validated_scores(s, args.scores, args.seqlen);
  result.mask = validated_mask(s, args.mask, args.seqlen);
  check_counts(result.cache);
  return result;
}

PendingIntervalsArgs validated(const PendingIntervalsArgs& args) {
  PendingIntervalsArgs result = args;
  result.cache = validated(args.cache);
  require_dense_rows(result.cache, cache_names);
  require_range("seqlen_q", args.seqlen_q, 0, args.cache.pending);
  check_values("kept_tokens", args.cache.shape, args.kept_tokens, args.cache.shape.batch,
               args.cache.pending);
  check_counts(result.cache);
  require_pointer("intervals", args.intervals, has_rows(args.cache.shape));
  return result;
}

CommitArgs validated(const CommitArgs& args) {
  CommitArgs result = args;
  result.cache = validated(args.cache);
  require_dense_rows(result.cache, cache_names);
  check_values("kept_tokens", args.cache.shape, args.kept_tokens, args.cache.shape.batch,
               args.cache.pending);
  check_counts(result.cache);
  return result;
}

DecodeStepArgs validated(const DecodeStepArgs& args) {
  DecodeStepArgs result = args;
  result.cache = validated(args.cache);
  const KvCacheShape& s = args.cache.shape;
  require_range("cache.pending", args.cache.pending, 0, 0);
  // The attention to the slots is a problem of its own, with the same checks as any other.
  validate(Problem{.batch = s.batch,
                   .heads_q = args.heads_q,
                   .heads_kv = s.heads_kv,
                   .seqlen_q = 1,
                   .seqlen_k = s.most_places(),
                   .head_dim = s.head_dim,
                   .value_dim = s.value_dim,
                   .dtype = s.dtype,
                   .device = s.device,
                   .scale = args.scale,
                   .softcap = args.softcap,
                   .nonfinite = args.nonfinite});
  check_input("q", args.q, {s.batch, 1, args.heads_q, s.head_dim});
  check_tokens(s, args.k, args.v, 1);
  result.scores = validated_scores(s, args.scores, 1);
  result.mask = validated_mask(s, args.mask, 1);
  check_output("out", args.out, {s.batch, 1, args.heads_q, value_dim_of(s)});
  require_pointer("lse", args.lse.data, s.batch > 0 && args.heads_q > 0);
  if (args.lse.dtype != DType::f32) throw InvalidArgument("lse", name_of(args.lse.dtype), "f32");
  check_counts(result.cache);
  return result;
}

}  // namespace flash_dmattn
