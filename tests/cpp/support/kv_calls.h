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
  KvCacheShape shape{.batch = 2,
                     .heads_kv = 2,
                     .keep = {.window = 4},
                     .chunk = 3,
                     .head_dim = 8,
                     .dtype = DType::f32};
  GuardedBuffer memory{kv_cache_size(shape), "cache"};
  GuardedBuffer other{kv_cache_size(shape), "other"};
  KvCache cache = kv_cache_in(memory, shape);
  std::vector<float> numbers = std::vector<float>(2 * 4 * 8);
  std::vector<KeyInterval> intervals = std::vector<KeyInterval>(2 * 2 * 7);
  std::vector<std::int32_t> index = {0, 1}, kept = {0, 1};
  std::array<std::int64_t, 4> stride = contiguous_strides({2, 1, 2, 8});
  std::string_view backend;
  GuardedBuffer workspace{1 << 16, "workspace"};
  Execution execution;

  AppendArgs append_args{.cache = cache,
                         .seqlen = 1,
                         .k = {numbers.data(), stride},
                         .v = {numbers.data(), stride},
                         .scores = {numbers.data()}};
  PendingIntervalsArgs intervals_args{.cache = cache, .seqlen_q = 1, .intervals = intervals.data()};
  CommitArgs commit_args{.cache = cache, .keep = kept.data()};
  FillArgs fill_args{.cache = cache,
                     .seqlen_k = 1,
                     .k = {numbers.data(), stride},
                     .v = {numbers.data(), stride},
                     .scores = {numbers.data()},
                     .intervals = {intervals.data()},
                     .seqlen_q = 1};
  CopyRowsArgs copy_args{.from = cache, .to = kv_cache_in(other, shape), .index = index.data()};
  DecodeStepArgs step_args{.cache = cache,
                           .heads_q = 4,
                           .scale = 1,
                           .q = {numbers.data(), contiguous_strides({2, 1, 4, 8})},
                           .k = {numbers.data(), stride},
                           .v = {numbers.data(), stride},
                           .scores = {numbers.data()},
                           .out = {numbers.data(), contiguous_strides({2, 1, 4, 8})},
                           .lse = numbers.data()};

  explicit KvCalls(std::string_view backend_name = {}, const Execution& on = in_turn(1))
      : backend(backend_name), execution(on) {
    execution.workspace = workspace.data();
    execution.workspace_bytes = workspace.size();
    intervals_args.cache.pending = commit_args.cache.pending = 1;
    clear();
    flash_dmattn::clear(copy_args.to, execution, backend);
  }

  void clear() const { flash_dmattn::clear(cache, execution, backend); }

  void run() const {
    append(append_args, execution, backend);
    PendingIntervalsCall(intervals_args, execution, backend).run(workspace_of(execution));
    CommitCall(commit_args, execution, backend).run(workspace_of(execution));
    fill(fill_args, execution, backend);
    copy_rows(copy_args, execution, backend);
    DecodeStepCall(step_args, execution, backend).run(workspace_of(execution));
  }
};

}  // namespace flash_dmattn::testing
