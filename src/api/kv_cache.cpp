#include "flash_dmattn/kv_cache.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "api/check_finite.h"
#include "api/validate_kv_cache.h"
#include "arguments.h"
#include "backend.h"
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
  check_counts(valid.from, "from.counts");
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
                        double scale, ScoreUse use) {
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
  if (use == ScoreUse::choose_and_bias) {
    problem.bias_shape = {s.batch, s.heads_kv, 1, keys};
    problem.bias_dtype = DType::f32;
  }
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
