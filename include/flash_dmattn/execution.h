#pragma once

#include <cstddef>
#include <memory>

namespace flash_dmattn {

// Runs body(argument, worker) once for every worker in [0, workers), on any threads and in any order,
// and returns when all have returned. `context` is Execution::parallel_context. The library's bodies
// do not throw. Results do not depend on how many of them run at the same time. Bodies compute in the floating-point
// environment (rounding mode, flushing of subnormal numbers) of the thread that calls the library.
using ParallelFor = void (*)(void* context, int workers, void (*body)(void* argument, int worker),
                             void* argument);

// The resources of a call. The caller owns them; the library allocates nothing and starts no thread.
struct Execution {
  int workers = 1;                     // >= 1; the workspace size depends on it
  ParallelFor parallel_for = nullptr;  // null: the calling thread runs all workers one by one
  void* parallel_context = nullptr;
  void* workspace = nullptr;  // aligned to workspace_alignment; its content need not be initialised
  std::size_t workspace_bytes = 0;  // at least what the call or its *_workspace_size names
  void* stream = nullptr;           // cudaStream_t of the CUDA backend; unused on the CPU
};

inline constexpr std::size_t workspace_alignment = 64;

// The built-in pool, for callers without threads of their own. Nothing else in the library starts one.
class ThreadPool {
 public:
  // Starts threads - 1 threads (the caller of parallel_for is one of the workers); threads >= 1, and
  // 0 takes the hardware's concurrency. Throws InvalidArgument and std::system_error.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const noexcept;

  // An Execution that runs on this pool; the caller still sets the workspace. Calls that share one
  // pool run one after the other. A body that calls its own pool runs all workers on its thread. A body
  // that calls its own pool through another pool's body deadlocks.
  Execution execution() noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace flash_dmattn
