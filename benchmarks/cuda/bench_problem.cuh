#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "backend.h"
#include "cuda/common/launch.h"
#include "flash_dmattn/selection.h"

// The problem that bench_attention times: tensors on the device and the schedule of their intervals.
namespace flash_dmattn::benchmark {

using cuda::check;
using Bf16 = __nv_bfloat16;

// The origin of key intervals: a selection of `window` keys by random scores, a sliding window,
// documents of `window` keys one after the other.
enum class Shown : std::uint8_t { all, selection, sliding, documents };

struct BenchCase {
  const char* name;
  int batch, heads_q, heads_kv, seqlen, head_dim;
  Shown shown;
  int window;
  bool bias;        // per key, with its gradient
  int pair_window;  // > 0: mask and bias [B, Hkv, N, N], this many keys of a row visible
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
  std::size_t size() const { return count_; }
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

// About `window` of the keys before each query, by a hash of (query, key).
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

inline std::size_t bias_size(const BenchCase& c) {
  if (c.pair_window > 0)
    return static_cast<std::size_t>(c.batch) * c.heads_kv * c.seqlen * c.seqlen;
  return c.bias ? static_cast<std::size_t>(c.batch) * c.heads_kv * c.seqlen : 0;
}

inline Run::Run(const BenchCase& bench)
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
  if (c.shown == Shown::all) return;
  host_intervals.resize(static_cast<std::size_t>(rows_k));
  if (c.shown != Shown::selection) {
    for (std::size_t i = 0; i < host_intervals.size(); ++i) {
      const int j = static_cast<int>(i % static_cast<std::size_t>(c.seqlen));
      const int last = c.shown == Shown::sliding ? j + c.window : (j / c.window + 1) * c.window;
      host_intervals[i] = {j, std::min(last, c.seqlen)};
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
    args.scores_dtype = DType::f32;
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

// The schedule of a direction, in memory of the device.
struct DeviceSchedule {
  DeviceArray<std::byte> memory;
  Schedule schedule;

  DeviceSchedule(const flash_dmattn::Problem& p, const Visibility& visibility, Direction direction)
      : memory(schedule_size(p, visibility, direction, {}, "cuda")) {
    Execution execution;
    execution.workspace_bytes = schedule_workspace_size(p, visibility, direction, {}, "cuda");
    const DeviceArray<std::byte> workspace(execution.workspace_bytes);
    execution.workspace = workspace.data();
    schedule =
        build_schedule(p, visibility, direction, {memory.data(), memory.size()}, execution, "cuda");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
};

}  // namespace flash_dmattn::benchmark
