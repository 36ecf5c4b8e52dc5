#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench.h"

// Memory of the device, and times of what runs on it.
namespace flash_dmattn::benchmark {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

// Holds everything that it gave until it ends.
class Arena {
 public:
  template <class T>
  T* take(std::int64_t count) {
    void* piece = nullptr;
    const auto bytes = static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * sizeof(T);
    check(cudaMalloc(&piece, bytes), "cudaMalloc");
    pieces_.emplace_back(piece);
    return static_cast<T*>(piece);
  }

  template <class T>
  T* copy(const std::vector<T>& host) {
    T* piece = take<T>(static_cast<std::int64_t>(host.size()));
    check(cudaMemcpy(piece, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
    return piece;
  }

  std::span<std::byte> bytes(std::size_t count) {
    return {take<std::byte>(static_cast<std::int64_t>(count)), count};
  }

 private:
  struct Free {
    void operator()(void* piece) const { cudaFree(piece); }
  };
  std::vector<std::unique_ptr<void, Free>> pieces_;
};

class Timer {
 public:
  explicit Timer(cudaStream_t stream) : stream_(stream) {
    check(cudaEventCreate(&begin_), "event");
    check(cudaEventCreate(&end_), "event");
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  // Median milliseconds of a call, of 15 groups of `calls` after one that warms up.
  template <class Call>
  double time(int calls, const Call& call) {
    std::vector<double> times;
    for (int group = -1; group < 15; ++group) {
      check(cudaEventRecord(begin_, stream_), "event");
      for (int i = 0; i < calls; ++i) call();
      check(cudaEventRecord(end_, stream_), "event");
      check(cudaEventSynchronize(end_), "event");
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, begin_, end_), "event");
      if (group >= 0) times.push_back(static_cast<double>(milliseconds) / calls);
    }
    return median(times);
  }

  // The same of replays of a graph of the call.
  template <class Call>
  double time_graph(int calls, const Call& call) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    call();
    check(cudaStreamEndCapture(stream_, &graph), "capture");
    check(cudaGraphInstantiate(&replay, graph, 0), "graph");
    const double result = time(calls, [&] { check(cudaGraphLaunch(replay, stream_), "graph"); });
    check(cudaGraphExecDestroy(replay), "graph");
    check(cudaGraphDestroy(graph), "graph");
    return result;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

}  // namespace flash_dmattn::benchmark
