#pragma once

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdint>

#include "flash_dmattn/execution.h"

namespace flash_dmattn {

// Gives the current thread the floating-point environment of another for a scope. Every thread has a rounding mode and a
// flushing of subnormal numbers of its own, and results must not depend on which thread computes them.
class BorrowedEnvironment {
 public:
  explicit BorrowedEnvironment(const std::fenv_t& other) {
    std::fegetenv(&own_);
    std::fesetenv(&other);
  }
  ~BorrowedEnvironment() { std::fesetenv(&own_); }
  BorrowedEnvironment(const BorrowedEnvironment&) = delete;
  BorrowedEnvironment& operator=(const BorrowedEnvironment&) = delete;

 private:
  std::fenv_t own_;
};

// Runs task(index, worker) for [0, count), which is divided into up to `most_parts` parts with a counter each. A worker
// takes indices from its own part first, then from the others.
template <int most_parts, class Task>
void pull_tasks(const Execution& execution, std::int64_t count, const Task& task) {
  struct alignas(64) Part {  // a cache line
    std::atomic<std::int64_t> next;
    std::int64_t end;
  };
  struct Queue {
    const Task& task;
    int parts;
    Part part[most_parts];
    std::fenv_t environment;  // of the calling thread

    void pull(int worker) {
      for (int i = 0; i < parts; ++i) {
        Part& from = part[(worker + i) % parts];
        for (std::int64_t index;
             (index = from.next.fetch_add(1, std::memory_order_relaxed)) < from.end;) {
          task(index, worker);
        }
      }
    }
  };
  const int workers =
      static_cast<int>(std::min<std::int64_t>(execution.workers, std::max<std::int64_t>(count, 0)));
  const int parts = std::min(workers, most_parts);
  Queue queue{task, parts, {}};
  for (int i = 0; i < parts; ++i) {
    queue.part[i].next.store(count * i / parts, std::memory_order_relaxed);
    queue.part[i].end = count * (i + 1) / parts;
  }
  if (workers > 1 && execution.parallel_for != nullptr) {
    std::fegetenv(&queue.environment);
    const auto body = [](void* argument, int worker) {
      auto& pulled = *static_cast<Queue*>(argument);
      const BorrowedEnvironment environment(pulled.environment);
      pulled.pull(worker);
    };
    execution.parallel_for(execution.parallel_context, workers, body, &queue);
  } else if (workers > 0) {
    queue.pull(0);
  }
}

// Runs task(index, worker) once for every index in [0, count). Workers pull indices from a counter,
// so a slow one does not delay the others; tasks must not depend on their worker or order.
template <class Task>
void for_each_task(const Execution& execution, std::int64_t count, const Task& task) {
  pull_tasks<1>(execution, count, task);
}

// Runs each task once, as for_each_task does, but each worker begins with its own part of [0, count) and then helps with
// the others: if consecutive tasks read consecutive memory, each worker reads one stream.
template <class Task>
void for_each_task_in_parts(const Execution& execution, std::int64_t count, const Task& task) {
  pull_tasks<64>(execution, count, task);
}

}  // namespace flash_dmattn
