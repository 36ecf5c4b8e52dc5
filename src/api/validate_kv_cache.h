#pragma once

#include <string_view>

#include "flash_dmattn/kv_cache.h"

// The checks of the arguments of kv_cache.h, before anything is written. Each throws InvalidArgument.
namespace flash_dmattn {

inline bool has_rows(const KvCacheShape& s) { return s.batch > 0 && s.heads_kv > 0; }

// Afterwards no product of dimensions overflows.
void check_shape(const KvCacheShape& shape);

void check_cache(const KvCache& cache);

// Of a cache whose content is read: counts of another window, or of memory without `clear`, would be read as slots that
// do not exist. On the CPU only: a GPU's callers keep them on the device. `name`: of the argument, in errors.
void check_counts(const KvCache& cache, std::string_view name = "cache.counts");

// Return the arguments as backends see them: no stride is dense_stride.
CopyRowsArgs validated(const CopyRowsArgs& args);
FillArgs validated(const FillArgs& args);
AppendArgs validated(const AppendArgs& args);
PendingIntervalsArgs validated(const PendingIntervalsArgs& args);
CommitArgs validated(const CommitArgs& args);
DecodeStepArgs validated(const DecodeStepArgs& args);

// Checks what workspace sizes do not depend on.
DecodeStepArgs with_validated_outputs(const DecodeStepArgs& args);

}  // namespace flash_dmattn
