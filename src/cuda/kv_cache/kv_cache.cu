#include "cuda/kv_cache/kv_cache.h"

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

WrittenRows rows_of_slots(const Tensor4& t) {  // [B, Hkv, slots, D]
  return {static_cast<std::byte*>(t.data), t.stride[0] * element_bytes, t.stride[1] * element_bytes,
          t.stride[2] * element_bytes};
}

Slots slots_of(const KvCache& cache) {
  const KvCacheShape& s = cache.shape;
  return {.k = rows_of_slots(cache.k),
          .v = rows_of_slots(cache.v),
          .scores = cache.scores,
          .positions = cache.positions,
          .counts = cache.counts,
          .seen = cache.seen,
          .heads = static_cast<int>(s.heads_kv),
          .window = static_cast<int>(s.window),
          .slots = static_cast<int>(s.slots()),
          .pending = static_cast<int>(cache.pending)};
}

// The way in which rows of all these tensors are copied.
template <class... Byte>
RowCopy row_copy(const KvCacheShape& shape, const RowTensor<Byte>&... tensors) {
  const std::int64_t bytes = shape.head_dim * element_bytes;
  const std::int64_t bits = (bytes | ... |
                             (reinterpret_cast<std::intptr_t>(tensors.data) | tensors.batch |
                              tensors.head | tensors.token));
  const int unit = bits % 16 == 0 ? 16 : element_bytes;
  return {.unit = unit, .units = static_cast<int>(bytes / unit)};
}

std::int64_t rows_of(const KvCacheShape& s) { return s.batch * s.heads_kv; }

template <class Kernel>
void launch_rows(const typename Kernel::Params& params, const Execution& execution) {
  launch<Kernel>(Kernel::blocks(params), params, stream_of(execution));
}

}  // namespace

// ---- Memory ---------------------------------------------------------------------------------------------

void clear(const KvCache& cache, const Execution& execution) {
  const KvCacheShape& s = cache.shape;
  const cudaStream_t stream = stream_of(execution);
  const auto zero = [&](void* data, std::int64_t bytes) {
    if (bytes > 0) {
      check(cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), stream), "cudaMemsetAsync");
    }
  };
  zero(cache.scores, rows_of(s) * s.slots() * 4);
  zero(cache.positions, rows_of(s) * s.slots() * 4);
  zero(cache.counts, rows_of(s) * static_cast<std::int64_t>(sizeof(SlotCount)));
  zero(cache.seen, s.batch * 4);
  const Slots slots = slots_of(cache);
  const RowCopy copy = row_copy(s, slots.k, slots.v);
  for_each(rows_of(s) * s.slots() * copy.units,
           ClearRows{slots.k, slots.v, slots.heads, slots.slots, copy}, stream);
}

void copy_rows(const CopyRowsArgs& args, const Execution& execution) {
  const Slots from = slots_of(args.from);
  const KvCacheShape& s = args.to.shape;
  Slots to = slots_of(args.to);
  to.pending = from.pending;
  const RowCopy copy = row_copy(s, from.k, from.v, to.k, to.v);
  for_each(rows_of(s) * (to.window + to.pending) * copy.units, CopyRows{from, to, args.index, copy},
           stream_of(execution));
}

// ---- Tokens ---------------------------------------------------------------------------------------------

void fill(const FillArgs& args, const Execution& execution) {
  const KvCacheShape& s = args.cache.shape;
  const Slots cache = slots_of(args.cache);
  launch_rows<FillSlotsKernel>({.cache = cache,
                                .scores = {args.scores, {}},
                                .intervals = args.intervals,
                                .lengths = args.lengths,
                                .seqlen_k = static_cast<int>(args.seqlen_k),
                                .seqlen_q = static_cast<int>(args.seqlen_q),
                                .batch = static_cast<int>(s.batch)},
                               execution);
  const ReadRows k = rows_of_tokens(args.k);
  const ReadRows v = rows_of_tokens(args.v);
  const RowCopy copy = row_copy(s, cache.k, cache.v, k, v);
  for_each(rows_of(s) * s.window * copy.units, FillRows{cache, k, v, copy}, stream_of(execution));
}

void append(const AppendArgs& args, const Execution& execution) {
  const KvCacheShape& s = args.cache.shape;
  const Slots cache = slots_of(args.cache);
  const ReadRows k = rows_of_tokens(args.k);
  const ReadRows v = rows_of_tokens(args.v);
  const RowCopy copy = row_copy(s, cache.k, cache.v, k, v);
  for_each(rows_of(s) * args.seqlen * copy.units,
           AppendTokens{cache, k, v, {args.scores, args.mask}, static_cast<int>(args.seqlen), copy},
           stream_of(execution));
}

// ---- Chunks ---------------------------------------------------------------------------------------------

namespace {

PendingParams pending_params(const KvCache& cache) {
  return {.cache = slots_of(cache),
          .batch = static_cast<int>(cache.shape.batch),
          .keep = nullptr,
          .seqlen_q = 0};
}

void pending_intervals(const PendingIntervalsArgs& args, const Execution& execution) {
  PendingParams params = pending_params(args.cache);
  params.seqlen_q = static_cast<int>(args.seqlen_q);
  params.intervals = args.intervals;
  launch_rows<FindEvictionsKernel>(params, execution);
}

// The workspace of a commit.
struct CommitMemory {
  std::int32_t* evicted_by;
  std::int32_t* places;
  std::size_t bytes;

  CommitMemory(const KvCache& cache, void* base) {
    WorkspaceAllocator workspace(base);
    const std::int64_t rows = rows_of(cache.shape);
    evicted_by = workspace.take<std::int32_t>(rows * (cache.shape.window + cache.pending));
    places = workspace.take<std::int32_t>(rows * cache.pending);
    bytes = workspace.used();
  }
};

std::size_t commit_workspace_size(const CommitArgs& args, const Execution&) {
  return CommitMemory(args.cache, nullptr).bytes;
}

void commit(const CommitArgs& args, const Execution& execution) {
  const CommitMemory memory(args.cache, execution.workspace);
  PendingParams params = pending_params(args.cache);
  params.keep = args.keep;
  params.evicted_by = memory.evicted_by;
  launch_rows<FindEvictionsKernel>(params, execution);
  const RowCopy copy = row_copy(args.cache.shape, params.cache.k, params.cache.v);
  launch_rows<CommitKernel>({params, copy, memory.places}, execution);
}

}  // namespace

void plan_pending_intervals(const PendingIntervalsArgs& args, const Execution& execution,
                            Plan<PendingIntervalsArgs>& plan) {
  make_plan<OnDevice<
      DirectCall<PendingIntervalsArgs, no_workspace<PendingIntervalsArgs>, pending_intervals>>>(
      args, execution, plan);
}

void plan_commit(const CommitArgs& args, const Execution& execution, Plan<CommitArgs>& plan) {
  make_plan<OnDevice<DirectCall<CommitArgs, commit_workspace_size, commit>>>(args, execution, plan);
}

}  // namespace flash_dmattn::cuda::kv
