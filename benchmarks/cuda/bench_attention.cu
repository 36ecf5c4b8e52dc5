#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "backend.h"
#include "cuda/common/launch.h"

// Times the CUDA backend's forward and backward and checks sampled rows of the same run against
// double:
//   bench_attention [substring of case names]
// A line per case: milliseconds (median), useful TFLOP/s, the backward once more with deterministic
// gradients, the largest relative error of the samples.
namespace flash_dmattn {
namespace {

using cuda::check;
using Bf16 = __nv_bfloat16;

struct BenchCase {
  const char* name;
  int batch, heads_q, heads_kv, seqlen, head_dim, window;  // window 0: dense
  bool sliding;     // else per-query selection of random scores
  bool bias;        // per key, with its gradient
  int pair_window;  // > 0: mask and bias [B, Hkv, N, N], this many keys of a row visible
};

constexpr BenchCase cases[] = {
    {"dense N8192 D128 H16", 1, 16, 16, 8192, 128, 0, false, false, 0},
    {"dense N32768 D128 H16", 1, 16, 16, 32768, 128, 0, false, false, 0},
    {"dense N32768 D64 H16", 1, 16, 16, 32768, 64, 0, false, false, 0},
    {"dma N32768 D128 H16 Hkv8 w2048", 1, 16, 8, 32768, 128, 2048, false, true, 0},
    {"dma N32768 D128 H16 Hkv16 w2048", 1, 16, 16, 32768, 128, 2048, false, true, 0},
    {"dma N32768 D128 H16 Hkv2 w2048", 1, 16, 2, 32768, 128, 2048, false, true, 0},
    {"dma N4096 D128 B2 H32 w2048", 2, 32, 32, 4096, 128, 2048, false, true, 0},
    {"sliding N32768 D128 H16 Hkv8 w2048", 1, 16, 8, 32768, 128, 2048, true, false, 0},
    {"pairs N32768 D64 H2 Hkv1 w1024", 1, 2, 1, 32768, 64, 0, false, false, 1024},
    {"pairs N32768 D64 H2 Hkv2 w1024", 1, 2, 2, 32768, 64, 0, false, false, 1024},
    {"pairs N4096 D128 H8 w2048", 1, 8, 8, 4096, 128, 0, false, false, 2048},
};

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    check(cudaMalloc(&data_, bytes()), "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    check(cudaMemcpy(data_, host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  std::vector<T> host() const {
    std::vector<T> result(count_);
    check(cudaMemcpy(result.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
          "cudaMemcpy");
    return result;
  }

 private:
  std::size_t bytes() const { return std::max<std::size_t>(count_ * sizeof(T), 1); }
  T* data_ = nullptr;
  std::size_t count_;
};

__host__ __device__ inline std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

struct FillNormal {
  Bf16* to;
  std::uint64_t seed;
  __device__ void operator()(long i) const {
    const std::uint64_t bits = mix(seed * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(i));
    const float u = (static_cast<float>(bits >> 40) + 1) * 0x1p-24f;
    const float w = static_cast<float>(bits & 0xffffff) * 0x1p-24f;
    to[i] = __float2bfloat16(sqrtf(-2 * logf(u)) * cosf(6.2831853f * w));
  }
};

// About `window` of the keys before each query, by a hash of the pair.
struct FillMask {
  std::uint8_t* to;
  int seqlen;
  int window;
  __device__ void operator()(long i) const {
    const long row = i / seqlen % seqlen;
    const std::uint64_t bits = mix(static_cast<std::uint64_t>(i) + 77);
    to[i] = (bits >> 32) * static_cast<std::uint64_t>(row + 1) >> 32 <
            static_cast<std::uint64_t>(window);
  }
};

struct alignas(workspace_alignment) AlignedBlock {
  std::byte bytes[workspace_alignment];
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

struct Run {
  explicit Run(const BenchCase& bench);

  const BenchCase& c;
  std::int64_t rows_q, rows_k;
  DeviceArray<Bf16> q, k, v, out, dout, dq, dk, dv, bias, dbias;
  DeviceArray<std::uint8_t> mask;
  DeviceArray<float> lse, lse_low;
  std::vector<KeyInterval> host_intervals;
  double visible = 0;  // pairs of all heads
};

std::size_t bias_size(const BenchCase& c) {
  if (c.pair_window > 0)
    return static_cast<std::size_t>(c.batch) * c.heads_kv * c.seqlen * c.seqlen;
  return c.bias ? static_cast<std::size_t>(c.batch) * c.heads_kv * c.seqlen : 0;
}

Run::Run(const BenchCase& bench)
    : c(bench),
      rows_q(static_cast<std::int64_t>(c.batch) * c.seqlen * c.heads_q),
      rows_k(static_cast<std::int64_t>(c.batch) * c.seqlen * c.heads_kv),
      q(rows_q * c.head_dim),
      k(rows_k * c.head_dim),
      v(rows_k * c.head_dim),
      out(rows_q * c.head_dim),
      dout(rows_q * c.head_dim),
      dq(rows_q * c.head_dim),
      dk(rows_k * c.head_dim),
      dv(rows_k * c.head_dim),
      bias(bias_size(c)),
      dbias(bias_size(c)),
      mask(c.pair_window > 0 ? bias_size(c) : 0),
      lse(rows_q),
      lse_low(rows_q) {
  cuda::for_each(rows_q * c.head_dim, FillNormal{q.data(), 1}, nullptr);
  cuda::for_each(rows_k * c.head_dim, FillNormal{k.data(), 2}, nullptr);
  cuda::for_each(rows_k * c.head_dim, FillNormal{v.data(), 3}, nullptr);
  cuda::for_each(rows_q * c.head_dim, FillNormal{dout.data(), 4}, nullptr);
  cuda::for_each(static_cast<long>(bias_size(c)), FillNormal{bias.data(), 5}, nullptr);
  if (c.pair_window > 0) {
    cuda::for_each(static_cast<long>(bias_size(c)), FillMask{mask.data(), c.seqlen, c.pair_window},
                   nullptr);
  }
  check(cudaDeviceSynchronize(), "fill");
  const double n = c.seqlen;
  visible = n * (n + 1) / 2 * c.batch * c.heads_q;
  if (c.pair_window > 0) {
    const double w = c.pair_window;
    visible = (n * w - w * (w - 1) / 2) * c.batch * c.heads_q;
  }
  if (c.window == 0) return;
  host_intervals.resize(static_cast<std::size_t>(rows_k));
  if (c.sliding) {
    for (std::size_t i = 0; i < host_intervals.size(); ++i) {
      const int j = static_cast<int>(i % static_cast<std::size_t>(c.seqlen));
      host_intervals[i] = {j, std::min(j + c.window, c.seqlen)};
    }
  } else {
    std::vector<float> scores(host_intervals.size());
    const std::vector<Bf16> values = bias.host();
    for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = __bfloat162float(values[i]);
    SelectionArgs args;
    args.batch = c.batch;
    args.heads = c.heads_kv;
    args.seqlen_q = args.seqlen_k = c.seqlen;
    args.window = c.window;
    args.scores = scores.data();
    args.scores_stride = {static_cast<std::int64_t>(c.heads_kv) * c.seqlen, c.seqlen, 1};
    args.intervals = host_intervals.data();
    Execution execution;
    std::vector<AlignedBlock> workspace(
        select_workspace_size(args, execution) / sizeof(AlignedBlock) + 1);
    execution.workspace = workspace.data();
    execution.workspace_bytes = workspace.size() * sizeof(AlignedBlock);
    select_key_intervals(args, execution);
  }
  visible = 0;
  for (const KeyInterval& interval : host_intervals)
    visible += std::max(interval.last - interval.first, 0);
  visible *= c.heads_q / c.heads_kv;
}

struct HostPlan {
  std::vector<std::int64_t> begin;
  std::vector<std::int32_t> count, full, keys;
  Plan plan;
};

struct DevicePlan {
  DeviceArray<std::int64_t> begin;
  DeviceArray<std::int32_t> count, full, keys;
  Plan plan;

  explicit DevicePlan(const HostPlan& host)
      : begin(host.begin), count(host.count), full(host.full), keys(host.keys), plan(host.plan) {
    if (plan.keys == nullptr) return;
    plan.begin = begin.data();
    plan.count = count.data();
    plan.full = full.data();
    plan.keys = keys.data();
  }
};

HostPlan host_plan(const Run& run, bool by_position) {
  HostPlan result;
  PlanArgs args;
  args.batch = run.c.batch;
  args.heads = run.c.heads_kv;
  args.seqlen_q = args.seqlen_k = run.c.seqlen;
  args.tile_rows = cuda_backend.query_tile_rows({});
  args.causal = true;
  args.by_position = by_position;
  args.intervals = {run.host_intervals.data(),
                    static_cast<std::int64_t>(run.c.heads_kv) * run.c.seqlen, run.c.seqlen};
  Execution execution;
  std::vector<AlignedBlock> workspace(plan_workspace_size(args, execution) / sizeof(AlignedBlock) +
                                      1);
  execution.workspace = workspace.data();
  execution.workspace_bytes = workspace.size() * sizeof(AlignedBlock);
  const std::size_t lists = static_cast<std::size_t>(
      args.batch * args.heads * ((args.seqlen_q + args.tile_rows - 1) / args.tile_rows));
  result.begin.resize(lists);
  result.count.resize(lists);
  result.full.resize(lists);
  result.keys.resize(static_cast<std::size_t>(plan_entries(args, execution)));
  result.plan = build_plan(
      args, {result.begin.data(), result.count.data(), result.full.data(), result.keys.data()},
      execution);
  return result;
}

// The largest error of sampled rows, relative to the largest magnitude of the sample.
struct Check {
  double error = 0;
  double magnitude = 0;
  void add(double actual, double expected) {
    const double difference = std::abs(actual - expected);
    error = std::isnan(difference) ? INFINITY : std::max(error, difference);
    magnitude = std::max(magnitude, std::abs(expected));
  }
  double relative() const { return magnitude > 0 ? error / magnitude : error; }
};

struct Samples {
  Check out, lse, dq, dk, dv, dbias;
};

Samples check_samples(const Run& run) {
  const BenchCase& c = run.c;
  const auto q = run.q.host(), k = run.k.host(), v = run.v.host(), out = run.out.host();
  const auto dout = run.dout.host(), dq = run.dq.host(), dk = run.dk.host(), dv = run.dv.host();
  const auto bias = c.pair_window > 0 ? std::vector<Bf16>() : run.bias.host();
  const auto dbias = c.pair_window > 0 ? std::vector<Bf16>() : run.dbias.host();
  const auto lse = run.lse.host();
  const int d = c.head_dim, n = c.seqlen, group = c.heads_q / c.heads_kv;
  const double scale = static_cast<double>(default_scale(d));
  const auto row = [&](const std::vector<Bf16>& x, int b, int i, int h, int heads) {
    return x.data() + ((static_cast<std::int64_t>(b) * n + i) * heads + h) * d;
  };
  const auto dot = [&](const Bf16* a, const Bf16* b) {
    double sum = 0;
    for (int e = 0; e < d; ++e)
      sum +=
          static_cast<double>(__bfloat162float(a[e])) * static_cast<double>(__bfloat162float(b[e]));
    return sum;
  };
  std::vector<std::uint8_t> mask_row(static_cast<std::size_t>(n), 1);
  std::vector<Bf16> bias_row(static_cast<std::size_t>(n));
  const auto load_pair_row = [&](int b, int h, int i) {
    const std::size_t at = ((static_cast<std::size_t>(b) * c.heads_kv + h / group) * n + i) * n;
    check(cudaMemcpy(mask_row.data(), run.mask.data() + at, n, cudaMemcpyDeviceToHost), "copy");
    check(cudaMemcpy(bias_row.data(), run.bias.data() + at, n * 2, cudaMemcpyDeviceToHost), "copy");
  };
  const auto score = [&](int b, int h, int i, int j) {
    if (j > i) return -INFINITY + 0.0;
    double s = scale * dot(row(q, b, i, h, c.heads_q), row(k, b, j, h / group, c.heads_kv));
    if (c.window > 0) {
      const KeyInterval interval =
          run.host_intervals[(static_cast<std::size_t>(b) * c.heads_kv + h / group) * n + j];
      if (i < interval.first || i >= interval.last) return -INFINITY + 0.0;
    }
    if (c.bias)
      s += static_cast<double>(
          __bfloat162float(bias[(static_cast<std::size_t>(b) * c.heads_kv + h / group) * n + j]));
    if (c.pair_window > 0) {
      if (mask_row[j] == 0) return -INFINITY + 0.0;
      s += static_cast<double>(__bfloat162float(bias_row[j]));
    }
    return s;
  };
  Samples samples;
  // A row of the gradient of a bias of pairs, summed over the heads of the group.
  const auto check_pair_gradients = [&](int b, int hk, int i) {
    std::vector<double> gradient(n);
    for (int h = hk * group; h < (hk + 1) * group; ++h) {
      const Bf16* go = row(dout, b, i, h, c.heads_q);
      const double delta = dot(go, row(out, b, i, h, c.heads_q));
      const double row_lse =
          static_cast<double>(lse[(static_cast<std::size_t>(b) * c.heads_q + h) * n + i]);
      for (int j = 0; j <= i; ++j) {
        const double s = score(b, h, i, j);
        if (s == -INFINITY) continue;
        gradient[j] += std::exp(s - row_lse) * (dot(go, row(v, b, j, hk, c.heads_kv)) - delta);
      }
    }
    std::vector<Bf16> actual(static_cast<std::size_t>(n));
    const std::size_t at = ((static_cast<std::size_t>(b) * c.heads_kv + hk) * n + i) * n;
    check(cudaMemcpy(actual.data(), run.dbias.data() + at, n * 2, cudaMemcpyDeviceToHost), "copy");
    for (int j = 0; j < n; ++j)
      samples.dbias.add(static_cast<double>(__bfloat162float(actual[j])), gradient[j]);
  };
  for (int sample = 0; sample < 12; ++sample) {
    const int b = sample % c.batch, h = sample * 5 % c.heads_q;
    const int i = sample == 0 ? 0 : static_cast<int>(mix(sample) % n);
    if (c.pair_window > 0) load_pair_row(b, h, i);
    std::vector<double> p(n);
    double max = -INFINITY, sum = 0;
    for (int j = 0; j <= i; ++j) max = std::max(max, p[j] = score(b, h, i, j));
    for (int j = 0; j <= i; ++j) sum += p[j] = max == -INFINITY ? 0 : std::exp(p[j] - max);
    if (c.pair_window > 0) check_pair_gradients(b, h / group, i);
    std::vector<double> o(d), g(d);
    const Bf16* go = row(dout, b, i, h, c.heads_q);
    const double delta = dot(go, row(out, b, i, h, c.heads_q));
    for (int j = 0; j <= i; ++j) {
      if (p[j] == 0) continue;
      const double ds = p[j] / sum * (dot(go, row(v, b, j, h / group, c.heads_kv)) - delta);
      for (int e = 0; e < d; ++e) {
        o[e] += p[j] / sum *
                static_cast<double>(__bfloat162float(row(v, b, j, h / group, c.heads_kv)[e]));
        g[e] += ds * scale *
                static_cast<double>(__bfloat162float(row(k, b, j, h / group, c.heads_kv)[e]));
      }
    }
    for (int e = 0; e < d; ++e) {
      samples.out.add(static_cast<double>(__bfloat162float(row(out, b, i, h, c.heads_q)[e])), o[e]);
      samples.dq.add(static_cast<double>(__bfloat162float(row(dq, b, i, h, c.heads_q)[e])), g[e]);
    }
    if (sum > 0)
      samples.lse.add(
          static_cast<double>(lse[(static_cast<std::size_t>(b) * c.heads_q + h) * n + i]),
          max + std::log(sum));
  }
  if (c.pair_window > 0) return samples;
  for (int sample = 0; sample < 4; ++sample) {
    const int b = sample % c.batch, hk = sample * 3 % c.heads_kv;
    const int j = static_cast<int>(mix(sample + 100) % n);
    std::vector<double> gk(d), gv(d);
    double gb = 0;
    for (int h = hk * group; h < (hk + 1) * group; ++h) {
      for (int i = j; i < n; ++i) {
        const double s = score(b, h, i, j);
        if (s == -INFINITY) continue;
        const double p = std::exp(
            s - static_cast<double>(lse[(static_cast<std::size_t>(b) * c.heads_q + h) * n + i]));
        const Bf16* go = row(dout, b, i, h, c.heads_q);
        const double ds =
            p * (dot(go, row(v, b, j, hk, c.heads_kv)) - dot(go, row(out, b, i, h, c.heads_q)));
        gb += ds;
        for (int e = 0; e < d; ++e) {
          gv[e] += p * static_cast<double>(__bfloat162float(go[e]));
          gk[e] +=
              ds * scale * static_cast<double>(__bfloat162float(row(q, b, i, h, c.heads_q)[e]));
        }
      }
    }
    for (int e = 0; e < d; ++e) {
      samples.dk.add(static_cast<double>(__bfloat162float(row(dk, b, j, hk, c.heads_kv)[e])),
                     gk[e]);
      samples.dv.add(static_cast<double>(__bfloat162float(row(dv, b, j, hk, c.heads_kv)[e])),
                     gv[e]);
    }
    if (c.bias)
      samples.dbias.add(static_cast<double>(__bfloat162float(
                            dbias[(static_cast<std::size_t>(b) * c.heads_kv + hk) * n + j])),
                        gb);
  }
  return samples;
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
  const DevicePlan plan(c.window > 0 ? host_plan(run, false) : HostPlan{});
  const DeviceArray<KeyInterval> intervals(run.host_intervals);
  if (c.window > 0) {
    p.intervals_shape = {p.batch, p.heads_kv};
    in.intervals = {intervals.data(), p.heads_kv * p.seqlen_k, p.seqlen_k};
    in.plan = plan.plan;
  }
  const ForwardArgs forward{.problem = p,
                            .in = in,
                            .out = tensor(run.out, c.heads_q),
                            .lse = run.lse.data(),
                            .lse_low = run.lse_low.data()};
  // Who knows that the intervals of neighbours are alike leaves the plan out: blocks of consecutive
  // keys then walk the queries that see them.
  Inputs backward_in = in;
  if (c.sliding) backward_in.plan = {};
  const BackwardArgs backward{.problem = p,
                              .in = backward_in,
                              .out = tensor(run.out, c.heads_q),
                              .lse = run.lse.data(),
                              .lse_low = run.lse_low.data(),
                              .dout = tensor(run.dout, c.heads_q),
                              .dq = tensor(run.dq, c.heads_q),
                              .dk = tensor(run.dk, c.heads_kv),
                              .dv = tensor(run.dv, c.heads_kv),
                              .dbias = dbias};
  const DevicePlan plan_by_position(c.window > 0 ? host_plan(run, true) : HostPlan{});
  BackwardArgs deterministic = backward;
  deterministic.problem.deterministic = true;
  if (backward_in.plan.keys != nullptr) deterministic.in.plan = plan_by_position.plan;
  Execution execution;
  execution.workspace_bytes =
      std::max({cuda_backend.forward_workspace_size(forward, execution),
                cuda_backend.backward_workspace_size(backward, execution),
                cuda_backend.backward_workspace_size(deterministic, execution)});
  const DeviceArray<std::byte> workspace(execution.workspace_bytes);
  execution.workspace = workspace.data();

  const int repeats = run.visible > 2e9 ? 5 : 15;
  const double forward_ms = time_ms(repeats, [&] { cuda_backend.forward(forward, execution); });
  const double backward_ms = time_ms(repeats, [&] { cuda_backend.backward(backward, execution); });
  const double deterministic_ms =
      time_ms(repeats, [&] { cuda_backend.backward(deterministic, execution); });
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
}  // namespace flash_dmattn

int main(int argc, char** argv) {
  for (const auto& c : flash_dmattn::cases) {
    if (argc < 2 || std::strstr(c.name, argv[1]) != nullptr) flash_dmattn::bench(c);
  }
  return 0;
}
