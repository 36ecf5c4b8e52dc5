#pragma once

#include "../backend.h"

namespace flash_dmattn {

// Every pointer of the arguments is to memory of the current device; Execution.stream is a
// cudaStream_t of it. Calls only enqueue work: no synchronisation, no allocation, capturable in a
// graph.
//
// The plan's begin, count, full and keys are device arrays too, and its tile_rows is what
// query_tile_rows says. Key intervals without a plan (null keys) are right but walk every key.
extern const Backend cuda_backend;  // src/cuda/backend.cu

}  // namespace flash_dmattn
