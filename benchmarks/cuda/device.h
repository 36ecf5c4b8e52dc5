#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench.h"

// Memory of the device, and times of what runs on it.
namespace flash_dmattn::bench {

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

 private:
  struct Free {
    void operator()(void* piece) const { cudaFree(piece); }
  };
  std::vector<std::unique_ptr<void, Free>> pieces_;
};

// Milliseconds of the device for a call, of `calls` after one that warms up, as the time of every iteration.
template <class Call>
void time(::benchmark::State& state, cudaStream_t stream, int calls, const Call& call) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  call();
  for (auto _ : state) {
    check(cudaEventRecord(begin, stream), "event");
    for (int i = 0; i < calls; ++i) call();
    check(cudaEventRecord(end, stream), "event");
    check(cudaEventSynchronize(end), "event");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "event");
    state.SetIterationTime(1e-3 * static_cast<double>(milliseconds) / calls);
  }
  check(cudaEventDestroy(begin), "event");
  check(cudaEventDestroy(end), "event");
}

// Times replays of a graph of the call.
template <class Call>
void time_graph(::benchmark::State& state, cudaStream_t stream, int calls, const Call& call) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  call();
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&replay, graph, 0), "graph");
  time(state, stream, calls, [&] { check(cudaGraphLaunch(replay, stream), "graph"); });
  check(cudaGraphExecDestroy(replay), "graph");
  check(cudaGraphDestroy(graph), "graph");
}

template <class Function>
void add(const std::string& name, const Function& function) {
  ::benchmark::RegisterBenchmark(name.c_str(), function)
      ->Unit(::benchmark::kMillisecond)
      ->Iterations(1)
      ->UseManualTime();
}

}  // namespace flash_dmattn::bench
