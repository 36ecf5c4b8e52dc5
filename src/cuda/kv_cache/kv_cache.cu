#include "cuda/kv_cache/kv_cache.h"

#include <algorithm>

#include "cuda/device_plan.h"
#include "cuda/kv_cache/fill.cuh"
#include "cuda/kv_cache/pending.cuh"
#include "cuda/kv_cache/rows.cuh"
#include "cuda/primitives/device_workspace.h"
#include "cuda/primitives/launch.h"

namespace flash_dmattn::cuda::kv {
namespace {

cudaStream_t stream_of(const Execution& execution) {
  return static_cast<cudaStream_t>(execution.stream);
}

// ---- Views ----------------------------------------------------------------------------------------------

constexpr int element_bytes = 2;

ReadRows rows_of_tokens(const ConstTensor4& t) {  // [B, S, Hkv, D]
  return {static_cast<const std::byte*>(t.data), t.stride[0] * element_bytes,
          t.stride[2] * element_bytes, t.stride[1] * element_bytes};
}

WrittenRows rows_of_slots(const Tensor4& t) {  // [B, Hkv, slots, D]; the stride of heads may be 0
  return {static_cast<std::byte*>(t.data), t.stride[0] * element_bytes, t.stride[1] * element_bytes,
          t.stride[2] * element_bytes};
}

Slots slots_of(const KvCache& cache) {
  const KvCacheShape& s = cache.shape;
  return {.k = rows_of_slots(cache.k),
          .v = rows_of_slots(cache.v),
          .scores = cache.scores,
          .entries = cache.positions,
          .counts = cache.counts,
          .seen = cache.seen,
          .rows = RowIndex(cache.rows),
          .rule = CacheRule(s),
          .heads = static_cast<int>(s.heads_kv),
          .pending = static_cast<int>(cache.pending)};
}

// The way in which rows of all these tensors are copied.
template <class... Byte>
RowCopy row_copy(const KvCacheShape& shape, const RowTensor<Byte>&... tensors) {
  const std::int64_t bytes = shape.head_dim * element_bytes;
  const std::int64_t value_bytes = value_dim_of(shape) * element_bytes;
  const std::int64_t bits = ((bytes | value_bytes) | ... |
                             (reinterpret_cast<std::intptr_t>(tensors.data) | tensors.batch |
                              tensors.head | tensors.token));
  const int unit = bits % 16 == 0 ? 16 : element_bytes;
  return {.unit = unit,
          .units = static_cast<int>(bytes / unit),
          .value_units = static_cast<int>(value_bytes / unit)};
}

std::int64_t rows_of(const KvCacheShape& s) { return s.batch * s.heads_kv; }

// The number of SlotUnit's items for the first `slots` slots of each head, without their units.
std::int64_t slot_items(const KvCacheShape& s, std::int64_t slots) {
  if (s.has_equal_heads()) return rows_of(s) * slots;
  return s.batch * std::max(s.total_slots(), s.heads_kv);
}

template <class Kernel>
void launch_rows(const typename Kernel::Params& params, const Execution& execution) {
  launch<Kernel>(Kernel::blocks(params), params, stream_of(execution));
}

}  // namespace

// ---- Memory ---------------------------------------------------------------------------------------------

void clear(const KvCache& cache, const Execution& execution) {
  const KvCacheShape& s = cache.shape;
  const Slots slots = slots_of(cache);
  const RowCopy copy = row_copy(s, slots.k, slots.v);
  for_each(slot_items(s, s.slots(0)) * copy.units, ClearRows{slots, copy}, stream_of(execution));
}

void copy_rows(const CopyRowsArgs& args, const Execution& execution) {
  Slots from = slots_of(args.from);
  from.rows.index = args.index;
  const KvCacheShape& s = args.to.shape;
  Slots to = slots_of(args.to);
  to.pending = from.pending;
  const RowCopy copy = row_copy(s, from.k, from.v, to.k, to.v);
  for_each(slot_items(s, s.places(0) + to.pending) * copy.units, CopyRows{from, to, copy},
           stream_of(execution));
}

// ---- Tokens ---------------------------------------------------------------------------------------------

void fill(const FillArgs& args, const Execution& execution) {
  const KvCacheShape& s = args.cache.shape;
  const Slots cache = slots_of(args.cache);
  launch_rows<FillSlotsKernel>({.cache = cache,
                                .scores = {args.scores, args.mask},
                                .intervals = args.intervals,
                                .lengths = args.lengths,
                                .seqlen_k = static_cast<int>(args.seqlen_k),
                                .seqlen_q = static_cast<int>(args.seqlen_q),
                                .batch = static_cast<int>(s.batch)},
                               execution);
  const ReadRows k = rows_of_tokens(args.k);
  const ReadRows v = rows_of_tokens(args.v);
  const RowCopy copy = row_copy(s, cache.k, cache.v, k, v);
  for_each(slot_items(s, s.places(0)) * copy.units, FillRows{cache, k, v, copy},
           stream_of(execution));
}

void append(const AppendArgs& args, const Execution& execution) {
  const KvCacheShape& s = args.cache.shape;
  const Slots cache = slots_of(args.cache);
  const ReadRows k = rows_of_tokens(args.k);
  const ReadRows v = rows_of_tokens(args.v);
  const RowCopy copy = row_copy(s, cache.k, cache.v, k, v);
  for_each(rows_of(s) * args.seqlen * copy.units,
           AppendTokens{.cache = cache,
                        .k = k,
                        .v = v,
                        .scores = {args.scores, args.mask},
                        .seqlen = static_cast<int>(args.seqlen),
                        .copy = copy},
           stream_of(execution));
}

// ---- Chunks ---------------------------------------------------------------------------------------------

namespace {

// The workspace of the calls over pending tokens.
struct PendingMemory {
  std::int32_t* arrivals = nullptr;
  std::int32_t* seen = nullptr;
  Fate* fates = nullptr;
  std::int32_t* places = nullptr;
  std::int32_t* destinations = nullptr;
  std::size_t bytes;

  PendingMemory(const KvCache& cache, bool commits, void* base) {
    WorkspaceAllocator workspace(base);
    const KvCacheShape& s = cache.shape;
    const std::int64_t rows = rows_of(s);
    if (delay_of(s.rule) > 0) arrivals = workspace.take<std::int32_t>(rows * cache.pending);
    if (commits) {
      seen = workspace.take<std::int32_t>(rows);
      fates = workspace.take<Fate>(pending_intervals_count(cache));
      places = workspace.take<std::int32_t>(rows * cache.pending);
      destinations = workspace.take<std::int32_t>(rows * cache.pending);
    }
    bytes = workspace.used();
  }
};

// Finds what becomes of every key, or the queries that see it.
PendingParams follow_keys(const KvCache& cache, const PendingMemory& memory,
                          const std::int32_t* kept_tokens, std::int64_t seqlen_q,
                          KeyInterval* intervals, const Execution& execution) {
  const KvCacheShape& s = cache.shape;
  const std::int64_t more_outputs = s.has_equal_heads() ? cache.pending : s.chunk;
  const PendingParams params{.cache = slots_of(cache),
                             .batch = static_cast<int>(s.batch),
                             .more_outputs = static_cast<int>(more_outputs),
                             .most_keys = static_cast<int>(s.most_places() + more_outputs),
                             .kept_tokens = kept_tokens,
                             .seqlen_q = static_cast<int>(seqlen_q),
                             .arrivals = memory.arrivals,
                             .fates = memory.fates,
                             .seen_before = memory.seen,
                             .intervals = intervals};
  if (params.arrivals != nullptr) launch_rows<FindArrivalsKernel>(params, execution);
  launch_rows<FindFatesKernel>(params, execution);
  return params;
}

std::size_t intervals_workspace_size(const PendingIntervalsArgs& args, const Execution&) {
  return PendingMemory(args.cache, false, nullptr).bytes;
}

void pending_intervals(const PendingIntervalsArgs& args, const Execution& execution) {
  const PendingMemory memory(args.cache, false, execution.workspace);
  follow_keys(args.cache, memory, args.kept_tokens, args.seqlen_q, args.intervals, execution);
}

std::size_t commit_workspace_size(const CommitArgs& args, const Execution&) {
  return PendingMemory(args.cache, true, nullptr).bytes;
}

void commit(const CommitArgs& args, const Execution& execution) {
  const PendingMemory memory(args.cache, true, execution.workspace);
  const PendingParams params =
      follow_keys(args.cache, memory, args.kept_tokens, 0, nullptr, execution);
  launch_rows<CommitKernel>({params, memory.places, memory.destinations}, execution);
  const RowCopy copy = row_copy(args.cache.shape, params.cache.k, params.cache.v);
  for_each(rows_of(args.cache.shape) * args.cache.pending * copy.units,
           MoveTokens{params.cache, memory.destinations, copy}, stream_of(execution));
}

}  // namespace

void plan_pending_intervals(const PendingIntervalsArgs& args, const Execution& execution,
                            Plan<PendingIntervalsArgs>& plan) {
  make_plan<
      OnDevice<DirectPlan<PendingIntervalsArgs, intervals_workspace_size, pending_intervals>>>(
      args, execution, plan);
}

void plan_commit(const CommitArgs& args, const Execution& execution, Plan<CommitArgs>& plan) {
  make_plan<OnDevice<DirectPlan<CommitArgs, commit_workspace_size, commit>>>(args, execution, plan);
}

}  // namespace flash_dmattn::cuda::kv
