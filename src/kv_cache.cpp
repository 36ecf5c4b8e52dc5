#include "flash_dmattn/kv_cache.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "arguments.h"
#include "backend.h"
#include "check_finite.h"
#include "validate.h"
#include "workspace_allocator.h"

// The functions of kv_cache.h: one check of every argument, then the first backend that keeps such caches.
namespace flash_dmattn {
namespace {

// ---- Backends ------------------------------------------------------------------------------------

// "" or why this backend does not keep a cache of the shape.
std::string why_not(const Backend& backend, const KvCacheShape& shape) {
  if (backend.device != shape.device) {
    return "computes in " + std::string(name_of(backend.device)) + " memory";
  }
  if (backend.kv == nullptr) {
    const BackendInfo info = backend.info();
    return info.available ? "keeps no KV caches" : info.reason;
  }
  return backend.kv->supports(shape);
}

struct Found {
  const KvBackend* kv = nullptr;  // null: none, for these reasons
  std::string reasons;
};

Found find_backend(const KvCacheShape& shape, std::string_view name) {
  if (!name.empty()) backend_named(name);
  Found found;
  for (const Backend* backend : backend_table()) {
    if (!name.empty() && backend->name != name) continue;
    // A reason takes memory, so backends of other devices give theirs only when none keeps the cache.
    if (backend->device == shape.device && why_not(*backend, shape).empty())
      return {backend->kv, ""};
  }
  for (const Backend* backend : backend_table()) {
    if (!name.empty() && backend->name != name) continue;
    found.reasons += (found.reasons.empty() ? "" : "; ") + std::string(backend->name) + ": " +
                     why_not(*backend, shape);
  }
  return found;
}

const KvBackend& choose_backend(const KvCacheShape& shape, std::string_view name) {
  const Found found = find_backend(shape, name);
  if (found.kv == nullptr) {
    throw InvalidArgument("backend", "\"" + std::string(name) + "\"",
                          "one that keeps the cache (" + found.reasons + ")");
  }
  return *found.kv;
}

// ---- Checks --------------------------------------------------------------------------------------

void check_range(std::string_view argument, std::int64_t value, std::int64_t least,
                 std::int64_t most) {
  if (value >= least && value <= most) return;
  throw InvalidArgument(argument, std::to_string(value),
                        std::to_string(least) + " to " + std::to_string(most));
}

void check_shape(const KvCacheShape& s) {
  require_length("cache.shape.batch", s.batch);
  require_length("cache.shape.heads_kv", s.heads_kv);
  require_length("cache.shape.window", s.window);
  require_length("cache.shape.chunk", s.chunk);
  if (s.window < 1) throw InvalidArgument("cache.shape.window", "0", "at least 1");
  require_length("cache.shape.window + chunk", s.slots());
  check_range("cache.shape.head_dim", s.head_dim, 1, 256);
  if (s.dtype > DType::f16) {
    throw InvalidArgument("cache.shape.dtype", name_of(s.dtype), "f32, bf16 or f16");
  }
  if (s.device > Device::cuda) {
    throw InvalidArgument("cache.shape.device", std::to_string(static_cast<int>(s.device)),
                          "cpu or cuda");
  }
  if (!product_fits({s.batch, s.heads_kv, s.slots(), s.head_dim})) {
    throw InvalidArgument("cache.shape",
                          std::to_string(s.batch) + " rows of " + std::to_string(s.heads_kv) +
                              " heads of " + std::to_string(s.slots()) + " slots",
                          "at most 2^56 elements");
  }
}

bool has_rows(const KvCacheShape& s) { return s.batch > 0 && s.heads_kv > 0; }

// The names of a cache's members in errors.
struct CacheNames {
  std::string_view k, v, scores, positions, counts, seen, pending;
};
constexpr CacheNames cache_names = {"cache.k",      "cache.v",    "cache.scores", "cache.positions",
                                    "cache.counts", "cache.seen", "cache.pending"};
constexpr CacheNames from_names = {"from.k",      "from.v",    "from.scores", "from.positions",
                                   "from.counts", "from.seen", "from.pending"};
constexpr CacheNames to_names = {"to.k",      "to.v",    "to.scores", "to.positions",
                                 "to.counts", "to.seen", "to.pending"};

void check_cache(const KvCache& cache, const CacheNames& names = cache_names) {
  const KvCacheShape& s = cache.shape;
  check_shape(s);
  const std::array shape = {s.batch, s.heads_kv, s.slots(), s.head_dim};
  check_output(names.k, cache.k, shape);
  check_output(names.v, cache.v, shape);
  require_pointer(names.scores, cache.scores, has_rows(s));
  require_pointer(names.positions, cache.positions, has_rows(s));
  require_pointer(names.counts, cache.counts, has_rows(s));
  require_pointer(names.seen, cache.seen, s.batch > 0);
  check_range(names.pending, cache.pending, 0, s.chunk);
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

// Of a cache whose content is read: counts of another window, or of memory without `clear`, would be read as slots that
// do not exist. As check_values, on the CPU only.
void check_counts(const KvCache& cache, std::string_view name = cache_names.counts) {
  const KvCacheShape& s = cache.shape;
  if (s.device != Device::cpu) return;
  for (std::int64_t row = 0; row < s.batch * s.heads_kv; ++row) {
    const SlotCount& slots = cache.counts[row];
    const auto check = [&](std::string_view member, std::int64_t value, std::int64_t most) {
      if (value >= 0 && value <= most) return;
      throw InvalidArgument(
          std::string(name) + "[" + std::to_string(row) + "]." + std::string(member),
          std::to_string(value), "0 to " + std::to_string(most));
    };
    check("count", slots.count, s.window);
    if (slots.count == s.window) check("victim", slots.victim, s.window - 1);
  }
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
  const std::array shape = {s.batch, length, s.heads_kv, s.head_dim};
  check_input("k", k, shape);
  check_input("v", v, shape);
}

CopyRowsArgs validated(const CopyRowsArgs& args) {
  check_cache(args.from, from_names);
  check_cache(args.to, to_names);
  const KvCacheShape& from = args.from.shape;
  const KvCacheShape& to = args.to.shape;
  const auto same = [](std::string_view field, std::int64_t got, std::int64_t expected) {
    check_range(field, got, expected, expected);
  };
  same("to.shape.heads_kv", to.heads_kv, from.heads_kv);
  same("to.shape.window", to.window, from.window);
  same("to.shape.head_dim", to.head_dim, from.head_dim);
  same("to.shape.dtype", static_cast<int>(to.dtype), static_cast<int>(from.dtype));
  same("to.shape.device", static_cast<int>(to.device), static_cast<int>(from.device));
  same("to.pending", args.to.pending, args.from.pending);
  require_pointer("index", args.index, to.batch > 0);
  check_values("index", to, args.index, to.batch, from.batch - 1);
  return args;
}

FillArgs validated(const FillArgs& args) {
  check_cache(args.cache);
  const KvCacheShape& s = args.cache.shape;
  require_length("seqlen_q", args.seqlen_q);
  check_tokens(s, args.k, args.v, args.seqlen_k);
  require_pointer("intervals", args.intervals.data, has_rows(s) && args.seqlen_k > 0);
  check_values("lengths", s, args.lengths, s.batch, args.seqlen_k);
  FillArgs result = args;
  result.scores = validated_scores(s, args.scores, args.seqlen_k);
  result.intervals = with_resolved_strides(args.intervals, s.batch, s.heads_kv, args.seqlen_k);
  return result;
}

AppendArgs validated(const AppendArgs& args) {
  check_cache(args.cache);
  const KvCacheShape& s = args.cache.shape;
  check_tokens(s, args.k, args.v, args.seqlen);
  check_range("seqlen", args.seqlen, 0, s.chunk - args.cache.pending);
  AppendArgs result = args;
  result.scores = validated_scores(s, args.scores, args.seqlen);
  result.mask = validated_mask(s, args.mask, args.seqlen);
  return result;
}

PendingIntervalsArgs validated(const PendingIntervalsArgs& args) {
  check_cache(args.cache);
  check_range("seqlen_q", args.seqlen_q, 0, args.cache.pending);
  return args;
}

CommitArgs validated(const CommitArgs& args) {
  check_cache(args.cache);
  check_values("keep", args.cache.shape, args.keep, args.cache.shape.batch, args.cache.pending);
  return args;
}

DecodeStepArgs validated(const DecodeStepArgs& args) {
  check_cache(args.cache);
  const KvCacheShape& s = args.cache.shape;
  check_range("cache.pending", args.cache.pending, 0, 0);
  // The attention to the slots is a problem of its own, with the same checks as any other.
  validate(Problem{.batch = s.batch,
                   .heads_q = args.heads_q,
                   .heads_kv = s.heads_kv,
                   .seqlen_q = 1,
                   .seqlen_k = s.window,
                   .head_dim = s.head_dim,
                   .dtype = s.dtype,
                   .device = s.device,
                   .scale = args.scale,
                   .softcap = args.softcap,
                   .nonfinite = args.nonfinite});
  check_input("q", args.q, {s.batch, 1, args.heads_q, s.head_dim});
  check_tokens(s, args.k, args.v, 1);
  DecodeStepArgs result = args;
  result.scores = validated_scores(s, args.scores, 1);
  result.mask = validated_mask(s, args.mask, 1);
  return result;
}

DecodeStepArgs with_validated_outputs(const DecodeStepArgs& args) {
  const KvCacheShape& s = args.cache.shape;
  check_output("out", args.out, {s.batch, 1, args.heads_q, s.head_dim});
  require_pointer("lse", args.lse.data, s.batch > 0 && args.heads_q > 0);
  if (args.lse.dtype != DType::f32) throw InvalidArgument("lse", name_of(args.lse.dtype), "f32");
  return args;
}

const Execution& checked(const Execution& execution) {
  require_workers(execution);
  return execution;
}

template <class Layout>
KvCache lay_out(BasicWorkspaceAllocator<Layout>& memory, const KvCacheShape& s) {
  const std::int64_t rows = s.batch * s.heads_kv;
  const std::array stride = contiguous_strides({s.batch, s.heads_kv, s.slots(), s.head_dim});
  const std::int64_t bytes = rows * s.slots() * s.head_dim * size_of(s.dtype);
  KvCache cache{.shape = s};
  cache.k = {memory.template take<std::byte>(bytes), stride};
  cache.v = {memory.template take<std::byte>(bytes), stride};
  cache.scores = memory.template take<float>(rows * s.slots());
  cache.positions = memory.template take<std::int32_t>(rows * s.slots());
  cache.counts = memory.template take<SlotCount>(rows);
  cache.seen = memory.template take<std::int32_t>(s.batch);
  return cache;
}

}  // namespace

std::string supports(const KvCacheShape& shape, std::string_view backend) {
  check_shape(shape);
  return find_backend(shape, backend).reasons;
}

// ---- Memory --------------------------------------------------------------------------------------

std::size_t kv_cache_size(const KvCacheShape& shape) {
  check_shape(shape);
  WorkspaceAllocator memory(nullptr);
  lay_out(memory, shape);
  return memory.used();
}

KvCache kv_cache_in(std::span<std::byte> memory, const KvCacheShape& shape) {
  const std::size_t bytes = kv_cache_size(shape);
  if (memory.size() < bytes) {
    throw InvalidArgument("memory", std::to_string(memory.size()) + " bytes",
                          "at least " + std::to_string(bytes) + " (kv_cache_size)");
  }
  if (reinterpret_cast<std::uintptr_t>(memory.data()) % workspace_alignment != 0) {
    throw InvalidArgument(
        "memory", "a misaligned address",
        "an address aligned to " + std::to_string(workspace_alignment) + " bytes");
  }
  WorkspaceAllocator allocator(memory.data());
  return lay_out(allocator, shape);
}

void clear(const KvCache& cache, const Execution& execution, std::string_view backend) {
  check_cache(cache);
  choose_backend(cache.shape, backend).clear(cache, checked(execution));
}

void copy_rows(const CopyRowsArgs& args, const Execution& execution, std::string_view backend) {
  const CopyRowsArgs valid = validated(args);
  check_counts(valid.from, from_names.counts);
  choose_backend(valid.to.shape, backend).copy_rows(valid, checked(execution));
}

// ---- Prefill and chunks --------------------------------------------------------------------------

std::size_t fill_workspace_size(const FillArgs& args, const Execution& execution,
                                std::string_view backend) {
  const FillArgs valid = validated(args);
  return choose_backend(valid.cache.shape, backend).fill_workspace_size(valid, checked(execution));
}

void fill(const FillArgs& args, const Execution& execution, std::string_view backend) {
  const FillArgs valid = validated(args);
  const KvBackend& kv = choose_backend(valid.cache.shape, backend);
  require_workspace(execution, kv.fill_workspace_size(valid, checked(execution)));
  kv.fill(valid, execution);
}

void append(const AppendArgs& args, const Execution& execution, std::string_view backend) {
  const AppendArgs valid = validated(args);
  check_counts(valid.cache);
  choose_backend(valid.cache.shape, backend).append(valid, checked(execution));
}

std::size_t pending_intervals_workspace_size(const PendingIntervalsArgs& args,
                                             const Execution& execution, std::string_view backend) {
  const PendingIntervalsArgs valid = validated(args);
  return choose_backend(valid.cache.shape, backend)
      .pending_intervals_workspace_size(valid, checked(execution));
}

void pending_intervals(const PendingIntervalsArgs& args, const Execution& execution,
                       std::string_view backend) {
  const PendingIntervalsArgs valid = validated(args);
  check_counts(valid.cache);
  require_pointer("intervals", args.intervals, has_rows(args.cache.shape));
  const KvBackend& kv = choose_backend(valid.cache.shape, backend);
  require_workspace(execution, kv.pending_intervals_workspace_size(valid, checked(execution)));
  kv.pending_intervals(valid, execution);
}

Problem pending_problem(const KvCache& cache, std::int64_t heads_q, std::int64_t seqlen_q,
                        float scale, ScoreUse use) {
  const KvCacheShape& s = cache.shape;
  const std::int64_t keys = s.window + cache.pending;
  Problem problem{.batch = s.batch,
                  .heads_q = heads_q,
                  .heads_kv = s.heads_kv,
                  .seqlen_q = seqlen_q,
                  .seqlen_k = keys,
                  .head_dim = s.head_dim,
                  .dtype = s.dtype,
                  .device = s.device,
                  .scale = scale,
                  .intervals_shape = {s.batch, s.heads_kv}};
  if (use == ScoreUse::choose_and_bias) problem.bias_shape = {s.batch, s.heads_kv, 1, keys};
  return problem;
}

Inputs pending_inputs(const KvCache& cache, const ConstTensor4& q, std::int64_t seqlen_q,
                      const KeyInterval* intervals, ScoreUse use) {
  const KvCacheShape& s = cache.shape;
  const auto by_token = [](const Tensor4& t) {  // [B, slots, Hkv, D]
    return ConstTensor4{t.data, {t.stride[0], t.stride[2], t.stride[1], t.stride[3]}};
  };
  Inputs in{.q = q, .k = by_token(cache.k), .v = by_token(cache.v)};
  if (use == ScoreUse::choose_and_bias) {
    in.bias = {cache.scores, {s.heads_kv * s.slots(), s.slots(), 0, 1}};
  }
  in.visibility.intervals.data = intervals;
  // Every query sees w slots at most, and each brings one.
  in.visibility.bound = {.base = s.window, .per_query = seqlen_q > 1 ? 1 : 0};
  return in;
}

std::size_t commit_workspace_size(const CommitArgs& args, const Execution& execution,
                                  std::string_view backend) {
  const CommitArgs valid = validated(args);
  return choose_backend(valid.cache.shape, backend)
      .commit_workspace_size(valid, checked(execution));
}

void commit(const CommitArgs& args, const Execution& execution, std::string_view backend) {
  const CommitArgs valid = validated(args);
  check_counts(valid.cache);
  const KvBackend& kv = choose_backend(valid.cache.shape, backend);
  require_workspace(execution, kv.commit_workspace_size(valid, checked(execution)));
  kv.commit(valid, execution);
}

// ---- Decoding ------------------------------------------------------------------------------------

std::size_t decode_step_workspace_size(const DecodeStepArgs& args, const Execution& execution,
                                       std::string_view backend) {
  const DecodeStepArgs valid = validated(args);
  return choose_backend(valid.cache.shape, backend)
      .decode_step_workspace_size(valid, checked(execution));
}

namespace {

// The new tokens and the results as those of attention among the tokens, for check mode.
ForwardArgs token_attention(const DecodeStepArgs& args) {
  ForwardArgs result;
  result.problem = pending_problem(args.cache, args.heads_q, 1, args.scale, ScoreUse::choose);
  result.problem.seqlen_k = 1;
  result.problem.intervals_shape = {};
  result.in = {.q = args.q, .k = args.k, .v = args.v};
  result.out = args.out;
  result.lse = args.lse;
  return result;
}

}  // namespace

void decode_step(const DecodeStepArgs& args, const Execution& execution, std::string_view backend) {
  const DecodeStepArgs valid = with_validated_outputs(validated(args));
  check_counts(valid.cache);
  const KvBackend& kv = choose_backend(valid.cache.shape, backend);
  require_workspace(execution, kv.decode_step_workspace_size(valid, checked(execution)));
  const bool check_finite = check_finite_enabled();
  if (check_finite) check_inputs_finite(token_attention(valid), execution);
  kv.decode_step(valid, execution);
  if (check_finite) check_outputs_finite(token_attention(valid), execution);
}

}  // namespace flash_dmattn
