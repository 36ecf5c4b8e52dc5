#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <latch>
#include <thread>
#include <vector>

#include "flash_dmattn/error.h"
#include "flash_dmattn/execution.h"

namespace flash_dmattn {
namespace {

// Calls body(worker) for each of the requested workers.
template <class Body>
void run_workers(const Execution& execution, int workers, Body body) {
  execution.parallel_for(
      execution.parallel_context, workers,
      [](void* argument, int worker) { (*static_cast<Body*>(argument))(worker); }, &body);
}

TEST(ThreadPool, HasRequestedNumberOfThreads) {
  EXPECT_EQ(ThreadPool(3).threads(), 3);
  EXPECT_GE(ThreadPool(0).threads(), 1);
  ThreadPool pool(2);
  EXPECT_EQ(pool.execution().workers, 2);
  EXPECT_EQ(pool.execution().workspace, nullptr);
  try {
    ThreadPool bad(-1);
    ADD_FAILURE() << "nothing thrown";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "threads: got -1, expected at least 1, or 0 for one per CPU");
  }
}

TEST(ThreadPool, RunsEveryWorkerOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (const int workers : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(workers));
      run_workers(pool.execution(), workers,
                  [&](int worker) { ++runs[static_cast<std::size_t>(worker)]; });
      for (const auto& count : runs) EXPECT_EQ(count, 1);
    }
  }
}

// Neither the workers, which write, nor the caller, which reads, synchronise by themselves.
TEST(ThreadPool, ManyShortCallsAreSynchronised) {
  ThreadPool pool(4);
  std::vector<std::int64_t> sums(6);
  for (int call = 0; call < 5000; ++call) {
    run_workers(pool.execution(), 6,
                [&](int worker) { sums[static_cast<std::size_t>(worker)] += worker; });
  }
  for (std::size_t worker = 0; worker < sums.size(); ++worker) {
    EXPECT_EQ(sums[worker], 5000 * static_cast<std::int64_t>(worker));
  }
}

TEST(ThreadPool, RunsAllThreadsAtOnce) {
  ThreadPool pool(3);
  std::latch all(3);  // opens only when three threads wait at the same time
  run_workers(pool.execution(), 3, [&](int) { all.arrive_and_wait(); });
  EXPECT_TRUE(all.try_wait());
}

TEST(ThreadPool, ConcurrentCallsRunOneAtATime) {
  ThreadPool pool(2);
  std::atomic<int> inside{0};
  std::atomic<int> total{0};
  const auto caller = [&] {
    for (int call = 0; call < 100; ++call) {
      run_workers(pool.execution(), 3, [&](int) {
        EXPECT_LE(++inside, 2);  // never more than the pool has threads
        ++total;
        --inside;
      });
    }
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) callers.emplace_back(caller);
  for (std::thread& thread : callers) thread.join();
  EXPECT_EQ(total, 4 * 100 * 3);
}

TEST(ThreadPool, NestedCallOnSamePoolRuns) {
  ThreadPool pool(3);
  std::atomic<int> total{0};
  for (int call = 0; call < 50; ++call) {
    run_workers(pool.execution(), 4,
                [&](int) { run_workers(pool.execution(), 5, [&](int) { ++total; }); });
  }
  EXPECT_EQ(total, 50 * 4 * 5);
}

TEST(ThreadPool, NestedCallOnAnotherPoolRuns) {
  ThreadPool outer(2);
  ThreadPool inner(2);
  std::atomic<int> total{0};
  run_workers(outer.execution(), 8,
              [&](int) { run_workers(inner.execution(), 4, [&](int) { ++total; }); });
  EXPECT_EQ(total, 8 * 4);
}

TEST(ThreadPool, StartsAndStopsWithoutWork) {
  for (int i = 0; i < 100; ++i) ThreadPool pool(1 + i % 4);
}

}  // namespace
}  // namespace flash_dmattn
