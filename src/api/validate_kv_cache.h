#pragma once

#include <string_view>

#include "flash_dmattn/kv_cache.h"

// The checks of the arguments of kv_cache.h, before anything is written. Each throws InvalidArgument.
namespace flash_dmattn {

inline bool has_rows(const KvCacheShape& s) { return s.batch > 0 && s.heads_kv > 0; }

// Afterwards no product of dimensions overflows.
void check_shape(const KvCacheShape& shape);

// Returns the cache as backends see it: no stride is dense_stride, and rows.count is known.
KvCache validated(const KvCache& cache);

// Return the arguments as backends see them: no stride is dense_stride.
CopyRowsArgs validated(const CopyRowsArgs& args);
FillArgs validated(const FillArgs& args);
AppendArgs validated(const AppendArgs& args);
PendingIntervalsArgs validated(const PendingIntervalsArgs& args);
CommitArgs validated(const CommitArgs& args);
DecodeStepArgs validated(const DecodeStepArgs& args);

}  // namespace flash_dmattn
