#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "flash_dmattn/execution.h"

namespace flash_dmattn {

// Runs task(index, worker) once for every index in [0, count). Workers pull indices from a counter,
// so a slow one does not delay the others; tasks must not depend on their worker or order.
template <class Task>
void for_each_task(const Execution& execution, std::int64_t count, const Task& task) {
  struct Queue {
    const Task& task;
    std::int64_t count;
    std::atomic<std::int64_t> next{0};
  } queue{task, count};
  const auto body = [](void* argument, int worker) {
    auto& pulled = *static_cast<Queue*>(argument);
    for (std::int64_t index;
         (index = pulled.next.fetch_add(1, std::memory_order_relaxed)) < pulled.count;) {
      pulled.task(index, worker);
    }
  };
  const int workers =
      static_cast<int>(std::min<std::int64_t>(execution.workers, std::max<std::int64_t>(count, 0)));
  if (workers > 1 && execution.parallel_for != nullptr) {
    execution.parallel_for(execution.parallel_context, workers, body, &queue);
  } else if (workers > 0) {
    body(&queue, 0);
  }
}

}  // namespace flash_dmattn
