#include <algorithm>
#include <cstdio>
#include <cstring>
#include <span>
#include <vector>

#include "backend.h"
#include "bench_problem.cuh"
#include "bench_samples.cuh"
#include "flash_dmattn/calls.h"

// Times the CUDA backend's forward and backward and checks sampled rows of the same run against
// double:
//   bench_attention [substring of case names]
// A line per case: milliseconds (median), useful TFLOP/s, the backward once more with deterministic
// gradients, the largest relative error of the samples.
namespace flash_dmattn::benchmark {
namespace {

constexpr BenchCase cases[] = {
    {"dense N8192 D128 H16", 1, 16, 16, 8192, 128, Shown::all, 0, false, 0},
    {"dense N32768 D128 H16", 1, 16, 16, 32768, 128, Shown::all, 0, false, 0},
    {"dense N32768 D64 H16", 1, 16, 16, 32768, 64, Shown::all, 0, false, 0},
    {"dma N32768 D128 H16 Hkv8 w2048", 1, 16, 8, 32768, 128, Shown::selection, 2048, true, 0},
    {"dma N32768 D128 H16 Hkv16 w2048", 1, 16, 16, 32768, 128, Shown::selection, 2048, true, 0},
    {"dma N32768 D128 H16 Hkv2 w2048", 1, 16, 2, 32768, 128, Shown::selection, 2048, true, 0},
    {"dma N4096 D128 B2 H32 w2048", 2, 32, 32, 4096, 128, Shown::selection, 2048, true, 0},
    {"sliding N32768 D128 H16 Hkv8 w2048", 1, 16, 8, 32768, 128, Shown::sliding, 2048, false, 0},
    {"documents N32768 D128 H16 Hkv8 of 2048", 1, 16, 8, 32768, 128, Shown::documents, 2048, false,
     0},
    {"dense_masks N32768 D64 H2 Hkv1 w1024", 1, 2, 1, 32768, 64, Shown::all, 0, false, 1024},
    {"dense_masks N32768 D64 H2 Hkv2 w1024", 1, 2, 2, 32768, 64, Shown::all, 0, false, 1024},
    {"dense_masks N8192 D128 H8 Hkv4 w2048", 1, 8, 4, 8192, 128, Shown::all, 0, false, 2048},
    {"dense_masks N4096 D128 H8 w2048", 1, 8, 8, 4096, 128, Shown::all, 0, false, 2048},
};

double median(std::vector<float> times) {
  std::sort(times.begin(), times.end());
  return static_cast<double>(times[times.size() / 2]);
}

template <class Body>
double time_ms(int repeats, const Body& body) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < repeats + 2; ++i) {
    check(cudaEventRecord(begin), "event");
    body();
    check(cudaEventRecord(end), "event");
    check(cudaEventSynchronize(end), "event");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "event");
    if (i >= 2) times.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return median(times);
}

void bench(const BenchCase& c) {
  Run run(c);
  Problem p;
  p.batch = c.batch;
  p.heads_q = c.heads_q;
  p.heads_kv = c.heads_kv;
  p.seqlen_q = p.seqlen_k = c.seqlen;
  p.head_dim = c.head_dim;
  p.dtype = DType::bf16;
  p.scale = default_scale(c.head_dim);
  p.device = Device::cuda;
  p.causal = true;
  Inputs in;
  const auto tensor = [&](const DeviceArray<Bf16>& array, std::int64_t heads) {
    return Tensor4{array.data(), contiguous_strides({p.batch, p.seqlen_q, heads, p.head_dim})};
  };
  in.q = tensor(run.q, c.heads_q);
  in.k = tensor(run.k, c.heads_kv);
  in.v = tensor(run.v, c.heads_kv);
  Tensor4 dbias;
  if (bias_size(c) > 0) {
    p.bias_dtype = DType::bf16;
    p.bias_shape = c.bias ? BroadcastShape{p.batch, p.heads_kv, 1, p.seqlen_k}
                          : BroadcastShape{p.batch, p.heads_kv, p.seqlen_q, p.seqlen_k};
    auto strides = contiguous_strides(p.bias_shape);
    if (c.bias) strides[2] = 0;
    in.bias = {run.bias.data(), strides};
    dbias = {run.dbias.data(), strides};
    if (c.pair_window > 0) {
      p.mask_shape = p.bias_shape;
      in.mask = {run.mask.data(), strides};
    }
  }
  const DeviceArray<KeyInterval> intervals(run.host_intervals);
  if (c.shown != Shown::all) {
    p.intervals_shape = {p.batch, p.heads_kv};
    in.visibility.intervals.data = intervals.data();
    in.visibility.bound = {
        .base = c.window, .per_query = 1, .consecutive = c.shown != Shown::selection};
  }
  auto deterministic_problem = p;
  deterministic_problem.deterministic = true;
  const DeviceSchedule forward_schedule(p, in.visibility, Direction::forward);
  const DeviceSchedule backward_schedule(p, in.visibility, Direction::backward);
  const DeviceSchedule deterministic_schedule(deterministic_problem, in.visibility,
                                              Direction::backward);
  const ForwardArgs forward{.problem = p,
                            .in = in,
                            .schedule = forward_schedule.schedule,
                            .out = tensor(run.out, c.heads_q),
                            .lse = run.lse.data(),
                            .lse_low = run.lse_low.data()};
  const BackwardArgs backward{.problem = p,
                              .in = in,
                              .schedule = backward_schedule.schedule,
                              .out = tensor(run.out, c.heads_q),
                              .lse = run.lse.data(),
                              .lse_low = run.lse_low.data(),
                              .dout = tensor(run.dout, c.heads_q),
                              .dq = tensor(run.dq, c.heads_q),
                              .dk = tensor(run.dk, c.heads_kv),
                              .dv = tensor(run.dv, c.heads_kv),
                              .dbias = dbias};
  BackwardArgs deterministic = backward;
  deterministic.problem = deterministic_problem;
  deterministic.schedule = deterministic_schedule.schedule;
  const Execution execution;
  const ForwardCall forward_call(forward, execution, "cuda");
  const BackwardCall backward_call(backward, execution, "cuda");
  const BackwardCall deterministic_call(deterministic, execution, "cuda");
  const std::size_t workspace_bytes =
      std::max({forward_call.workspace_size(), backward_call.workspace_size(),
                deterministic_call.workspace_size()});
  const DeviceArray<std::byte> memory(workspace_bytes);
  const std::span<std::byte> workspace(memory.data(), workspace_bytes);

  const int repeats = run.visible > 2e9 ? 5 : 15;
  const double forward_ms = time_ms(repeats, [&] { forward_call.run(workspace); });
  const double backward_ms = time_ms(repeats, [&] { backward_call.run(workspace); });
  const double deterministic_ms = time_ms(repeats, [&] { deterministic_call.run(workspace); });
  const Samples s = check_samples(run);
  const double flops = 4.0 * c.head_dim * run.visible;
  std::printf(
      "%-36s fwd %8.3f ms %6.1f  bwd %8.3f ms %6.1f  deterministic %8.3f ms  err out %.4f lse %.1e "
      "dq %.4f dk %.4f dv %.4f "
      "dbias %.4f\n",
      c.name, forward_ms, flops / forward_ms * 1e-9, backward_ms, 2.5 * flops / backward_ms * 1e-9,
      deterministic_ms, s.out.relative(), s.lse.relative(), s.dq.relative(), s.dk.relative(),
      s.dv.relative(), s.dbias.relative());
  std::fflush(stdout);
}

}  // namespace
}  // namespace flash_dmattn::benchmark

int main(int argc, char** argv) {
  for (const auto& c : flash_dmattn::benchmark::cases) {
    if (argc < 2 || std::strstr(c.name, argv[1]) != nullptr) flash_dmattn::benchmark::bench(c);
  }
  return 0;
}
