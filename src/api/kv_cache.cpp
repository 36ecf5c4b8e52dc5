#include "flash_dmattn/kv_cache.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "api/checked_call.h"
#include "api/find_backend.h"
#include "api/validate_kv_cache.h"
#include "backend.h"
#include "common/arguments.h"
#include "common/kv_cache/views.h"
#include "common/workspace_allocator.h"

// The functions of kv_cache.h: one check of every argument, then the first backend that keeps such caches.
namespace flash_dmattn {
namespace {

// ---- Backends ------------------------------------------------------------------------------------

// KvBackend::find_decode_step of any backend.
PlanFunction<DecodeStepArgs> find_decode_step(const Backend& backend, const KvCacheShape& shape,
                                              std::string& reason) {
  if (backend.device != shape.device) {
    reason = "computes in " + std::string(name_of(backend.device)) + " memory";
    return nullptr;
  }
  if (backend.kv == nullptr) {
    const BackendInfo info = backend.info();
    reason = info.available ? "keeps no KV caches" : info.reason;
    return nullptr;
  }
  return backend.kv->find_decode_step(shape, reason);
}

FoundBackend<DecodeStepArgs> backend_for(const KvCacheShape& shape, std::string_view name) {
  return search_backends<DecodeStepArgs>(shape.device, name,
                                         [&](const Backend& backend, std::string& reason) {
                                           return find_decode_step(backend, shape, reason);
                                         });
}

FoundBackend<DecodeStepArgs> required_backend(const KvCacheShape& shape, std::string_view name) {
  return require_backend(backend_for(shape, name), name, "one that keeps the cache");
}

// The functions of the backend that keeps such caches.
const KvBackend& kv_backend_for(const KvCacheShape& shape, std::string_view name) {
  return *required_backend(shape, name).backend->kv;
}

template <class Layout>
KvCache lay_out(BasicWorkspaceAllocator<Layout>& memory, const KvCacheShape& s) {
  const std::int64_t slots = s.total_slots();
  const auto slots_of = [&](std::int64_t columns) -> Tensor4 {
    const std::int64_t bytes = s.batch * slots * columns * size_of(s.dtype);
    const std::int64_t head = s.has_equal_heads() ? s.slots(0) * columns : 0;
    return {memory.template take<std::byte>(bytes), {slots * columns, head, columns, 1}};
  };
  KvCache cache{.shape = s};
  cache.k = slots_of(s.head_dim);
  cache.v = slots_of(value_dim_of(s));
  cache.scores = memory.template take<float>(s.batch * slots);
  cache.positions = memory.template take<std::int32_t>(s.batch * slots);
  cache.counts = memory.template take<SlotCount>(s.batch * s.heads_kv);
  cache.seen = memory.template take<std::int32_t>(s.batch);
  return cache;
}

}  // namespace

std::string supports(const KvCacheShape& shape, std::string_view backend) {
  check_shape(shape);
  return backend_for(shape, backend).reasons;
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
  require_aligned("memory", memory.data(), workspace_alignment);
  WorkspaceAllocator allocator(memory.data());
  return lay_out(allocator, shape);
}

void clear_cache(const KvCache& cache, const Execution& execution, std::string_view backend) {
  const KvCache valid = validated(cache);
  kv_backend_for(valid.shape, backend).clear(valid, checked_execution(execution));
}

void copy_rows(const CopyRowsArgs& args, const Execution& execution, std::string_view backend) {
  const CopyRowsArgs valid = validated(args);
  kv_backend_for(valid.to.shape, backend).copy_rows(valid, checked_execution(execution));
}

// ---- Prefill and chunks --------------------------------------------------------------------------

void fill_cache(const FillArgs& args, const Execution& execution, std::string_view backend) {
  const FillArgs valid = validated(args);
  kv_backend_for(valid.cache.shape, backend).fill(valid, checked_execution(execution));
}

void append_tokens(const AppendArgs& args, const Execution& execution, std::string_view backend) {
  const AppendArgs valid = validated(args);
  kv_backend_for(valid.cache.shape, backend).append(valid, checked_execution(execution));
}

PendingIntervalsArgs plan_call(const PendingIntervalsArgs& args, const Execution& execution,
                               std::string_view backend, Plan<PendingIntervalsArgs>& plan) {
  const PendingIntervalsArgs valid = validated(args);
  kv_backend_for(valid.cache.shape, backend).plan_pending_intervals(valid, execution, plan);
  return valid;
}

std::int64_t pending_intervals_count(const KvCache& cache) {
  const KvCacheShape& s = cache.shape;
  if (!s.has_equal_heads()) return s.batch * s.total_slots();
  return s.batch * s.heads_kv * (s.most_places() + cache.pending);
}

Problem pending_problem(const KvCache& cache, std::int64_t heads_q, std::int64_t seqlen_q,
                        double scale, ScoreUse use) {
  KvCacheShape s = cache.shape;
  std::int64_t keys = s.most_places() + cache.pending;
  if (!s.has_equal_heads()) {
    keys = s.total_slots();
    heads_q = heads_q / s.heads_kv;
    seqlen_q *= s.heads_kv;
    s.heads_kv = 1;
  }
  Problem problem = problem_of_slots(s, heads_q, seqlen_q, keys, scale, use);
  problem.intervals_shape = {s.batch, s.heads_kv};
  return problem;
}

Inputs pending_inputs(const KvCache& cache, const ConstTensor4& q, std::int64_t seqlen_q,
                      const KeyInterval* intervals, ScoreUse use) {
  const KvCacheShape& s = cache.shape;
  Inputs in = inputs_of_slots(cache, q, use);
  in.visibility.intervals.data = intervals;
  // A query sees at most as many keys as its head has places, and each further query adds one. If the queries of heads
  // follow each other, `seqlen_q` more queries are those of one more head, and two neighbours may be of two heads.
  const std::int64_t places = s.most_places();
  in.visibility.bound = {.base = places, .per_query = seqlen_q > 1 ? 1 : 0};
  if (!s.has_equal_heads() && seqlen_q > 0) {
    in.visibility.bound = {.base = 2 * places, .per_query = 1 + (places + seqlen_q - 1) / seqlen_q};
  }
  return in;
}

CommitArgs plan_call(const CommitArgs& args, const Execution& execution, std::string_view backend,
                     Plan<CommitArgs>& plan) {
  const CommitArgs valid = validated(args);
  kv_backend_for(valid.cache.shape, backend).plan_commit(valid, execution, plan);
  return valid;
}

// ---- Decoding ------------------------------------------------------------------------------------

DecodeStepArgs plan_call(const DecodeStepArgs& args, const Execution& execution,
                         std::string_view backend, Plan<DecodeStepArgs>& plan) {
  const DecodeStepArgs valid = validated(args);
  required_backend(valid.cache.shape, backend).plan(valid, execution, plan);
  return valid;
}

template class CheckedCall<PendingIntervalsArgs>;
template class CheckedCall<CommitArgs>;
template class CheckedCall<DecodeStepArgs>;

}  // namespace flash_dmattn
