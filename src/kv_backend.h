#pragma once

#include <cstddef>
#include <string>

#include "flash_dmattn/kv_cache.h"

// The part of a backend that keeps KV caches: the functions of kv_cache.h. Arguments have been validated when it sees
// them, and no stride is dense_stride.
namespace flash_dmattn {

struct KvBackend {
  std::string (*supports)(const KvCacheShape&);  // "" = yes, else why not
  void (*clear)(const KvCache&, const Execution&);
  void (*copy_rows)(const CopyRowsArgs&, const Execution&);
  std::size_t (*fill_workspace_size)(const FillArgs&, const Execution&);
  void (*fill)(const FillArgs&, const Execution&);
  void (*append)(const AppendArgs&, const Execution&);
  std::size_t (*pending_intervals_workspace_size)(const PendingIntervalsArgs&, const Execution&);
  void (*pending_intervals)(const PendingIntervalsArgs&, const Execution&);
  std::size_t (*commit_workspace_size)(const CommitArgs&, const Execution&);
  void (*commit)(const CommitArgs&, const Execution&);
  std::size_t (*decode_step_workspace_size)(const DecodeStepArgs&, const Execution&);
  void (*decode_step)(const DecodeStepArgs&, const Execution&);
};

extern const KvBackend cpu_kv_backend;        // src/cpu/kv_cache.cpp
extern const KvBackend cuda_kv_backend;       // src/cuda/kv_cache/kv_cache.cu
extern const KvBackend reference_kv_backend;  // src/reference/kv_cache.cpp

}  // namespace flash_dmattn
