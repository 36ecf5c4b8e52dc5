#pragma once

#include "flash_dmattn/kv_cache.h"
#include "flash_dmattn/plan.h"

// The functions of KV caches that do not depend on a family.
namespace flash_dmattn::cuda::kv {

void clear(const KvCache& cache, const Execution& execution);
void copy_rows(const CopyRowsArgs& args, const Execution& execution);
void fill(const FillArgs& args, const Execution& execution);
void append(const AppendArgs& args, const Execution& execution);
void plan_pending_intervals(const PendingIntervalsArgs& args, const Execution& execution,
                            Plan<PendingIntervalsArgs>& plan);
void plan_commit(const CommitArgs& args, const Execution& execution, Plan<CommitArgs>& plan);

}  // namespace flash_dmattn::cuda::kv
