#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "flash_dmattn/error.h"
#include "flash_dmattn/execution.h"

namespace flash_dmattn {

struct ThreadPool::State {
  // The state of one call of parallel_for.
  struct Job {
    void (*body)(void* argument, int worker) = nullptr;  // null: no call is open
    void* argument = nullptr;
    int workers = 0;
  };

  explicit State(int threads) {
    helpers.reserve(static_cast<std::size_t>(threads - 1));
    try {
      for (int i = 1; i < threads; ++i) helpers.emplace_back([this] { help(); });
    } catch (...) {
      stop_and_join();
      throw;
    }
  }

  ~State() { stop_and_join(); }

  static void parallel_for(void* context, int workers, void (*body)(void*, int), void* argument) {
    static_cast<State*>(context)->call({body, argument, workers});
  }

  void call(const Job& mine) {
    // A body that calls its own pool finds it taken by its own call.
    if (running == this || helpers.empty()) {
      for (int worker = 0; worker < mine.workers; ++worker) mine.body(mine.argument, worker);
      return;
    }
    const std::lock_guard turn(callers);
    {
      const std::lock_guard lock(mutex);
      job = mine;
      next.store(0, std::memory_order_relaxed);
      ++calls;
    }
    opened.notify_all();
    work(mine);
    std::unique_lock lock(mutex);
    // All workers are taken. Helpers that wake only now find the call closed.
    finished.wait(lock, [this] { return helping == 0; });
    job = {};
  }

  void help() {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      opened.wait(lock, [&] { return stopping || calls != seen; });
      if (stopping) return;
      seen = calls;
      if (job.body == nullptr) continue;
      ++helping;
      const Job current = job;
      lock.unlock();
      work(current);
      lock.lock();
      if (--helping == 0) finished.notify_one();
    }
  }

  void work(const Job& current) {
    const State* const outer = std::exchange(running, this);
    for (std::int64_t worker;
         (worker = next.fetch_add(1, std::memory_order_relaxed)) < current.workers;) {
      current.body(current.argument, static_cast<int>(worker));
    }
    running = outer;
  }

  void stop_and_join() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    opened.notify_all();
    for (std::thread& helper : helpers) helper.join();
  }

  // The pool whose body this thread is in.
  static inline thread_local const State* running = nullptr;

  std::mutex callers;  // held during a call
  std::mutex mutex;    // guards the members below, except `next`
  std::condition_variable opened;
  std::condition_variable finished;
  Job job;
  std::uint64_t calls = 0;
  int helping = 0;  // helpers inside work()
  bool stopping = false;
  std::atomic<std::int64_t> next{0};  // the next worker to run; 64 bits, as it runs past `workers`
  std::vector<std::thread> helpers;
};

namespace {

int thread_count(int threads) {
  if (threads < 0) {
    throw InvalidArgument("threads", std::to_string(threads), "at least 1, or 0 for one per CPU");
  }
  return threads > 0 ? threads
                     : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>(thread_count(threads))) {}

ThreadPool::~ThreadPool() = default;

int ThreadPool::threads() const noexcept { return static_cast<int>(state_->helpers.size()) + 1; }

Execution ThreadPool::execution() noexcept {
  Execution execution;
  execution.workers = threads();
  execution.parallel_for = &State::parallel_for;
  execution.parallel_context = state_.get();
  return execution;
}

}  // namespace flash_dmattn
