#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "flash_dmattn/flash_dmattn.h"
#include "support/buffer.h"
#include "support/run.h"

namespace flash_dmattn::testing {

// A correct call of each function of KV caches, which tests spoil.
struct KvCalls {
  static constexpr KvCacheShape small{.batch = 2,
                                      .heads_kv = 2,
                                      .rule = {.window = 4},
                                      .chunk = 3,
                                      .head_dim = 8,
                                      .dtype = DType::f32};
  KvCacheShape shape;
  std::int64_t tokens;  // that are appended, committed and filled in at once
  GuardedBuffer memory{kv_cache_size(shape), "cache"};
  GuardedBuffer other{kv_cache_size(shape), "other"};
  KvCache cache = kv_cache_in(memory, shape);
  std::vector<float> numbers = std::vector<float>(shape.batch * tokens * 4 * shape.head_dim);
  std::vector<KeyInterval> intervals = std::vector<KeyInterval>(shape.batch * shape.total_slots());
  std::vector<std::int32_t> index = {0, 1}, kept = {0, 1};
  std::array<std::int64_t, 4> stride = stride_of(tokens, shape.heads_kv);
  std::array<std::int64_t, 4> stride_of_one = stride_of(1, shape.heads_kv);
  std::string_view backend;
  GuardedBuffer workspace{1 << 18, "workspace"};
  Execution execution;

  AppendArgs append_args{.cache = cache,
                         .seqlen = tokens,
                         .k = {numbers.data(), stride},
                         .v = {numbers.data(), stride},
                         .scores = {numbers.data()}};
  PendingIntervalsArgs intervals_args{
      .cache = cache, .seqlen_q = tokens, .intervals = intervals.data()};
  CommitArgs commit_args{.cache = cache, .kept_tokens = kept.data()};
  FillArgs fill_args{.cache = cache,
                     .seqlen_k = tokens,
                     .k = {numbers.data(), stride},
                     .v = {numbers.data(), stride},
                     .scores = {numbers.data()},
                     .intervals = {intervals.data()},
                     .seqlen_q = tokens};
  CopyRowsArgs copy_args{.from = cache, .to = kv_cache_in(other, shape), .index = index.data()};
  DecodeStepArgs step_args{.cache = cache,
                           .heads_q = 4,
                           .scale = 1,
                           .q = {numbers.data(), stride_of(1, 4)},
                           .k = {numbers.data(), stride_of_one},
                           .v = {numbers.data(), stride_of_one},
                           .scores = {numbers.data()},
                           .out = {numbers.data(), stride_of(1, 4)},
                           .lse = numbers.data()};

  explicit KvCalls(std::string_view backend_name = {},
                   const Execution& on = sequential_execution(1),
                   const KvCacheShape& cache_shape = small, std::int64_t tokens_at_once = 1)
      : shape(cache_shape), tokens(tokens_at_once), backend(backend_name), execution(on) {
    execution.workspace = workspace.data();
    execution.workspace_bytes = workspace.size();
    intervals_args.cache.pending = commit_args.cache.pending = tokens;
    clear();
    clear_cache(copy_args.to, execution, backend);
  }

  std::array<std::int64_t, 4> stride_of(std::int64_t seqlen, std::int64_t heads) const {
    return contiguous_strides({shape.batch, seqlen, heads, shape.head_dim});
  }

  void clear() const { clear_cache(cache, execution, backend); }

  void run() const {
    append_tokens(append_args, execution, backend);
    PendingIntervalsCall(intervals_args, execution, backend).run(workspace_of(execution));
    CommitCall(commit_args, execution, backend).run(workspace_of(execution));
    fill_cache(fill_args, execution, backend);
    copy_rows(copy_args, execution, backend);
    DecodeStepCall(step_args, execution, backend).run(workspace_of(execution));
  }
};

}  // namespace flash_dmattn::testing
