#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/primitives/launch.h"
#include "device.h"
#include "flash_dmattn/calls.h"

// Times the CUDA backend's forward and backward, without selection and schedule, and the backward with deterministic
// gradients.
//   bench_attention --benchmark_filter=dense.causal
namespace flash_dmattn::bench {
namespace {

using Bf16 = __nv_bfloat16;

// A window is of keys per query, or of tokens per document.
struct Case {
  std::string kind;  // as in benchmarks/harness/cases.py
  int batch, heads_q, heads_kv, seqlen, head_dim;
  int window = 0;
};

const Case cases[] = {
    {"dense causal", 1, 16, 16, 8192, 128},     {"dense causal", 1, 16, 16, 32768, 128},
    {"dense causal", 1, 16, 16, 32768, 64},     {"per_query", 1, 16, 8, 32768, 128, 2048},
    {"per_query", 1, 16, 16, 32768, 128, 2048}, {"per_query", 1, 16, 2, 32768, 128, 2048},
    {"per_query", 2, 32, 32, 4096, 128, 2048},  {"sliding", 1, 16, 8, 32768, 128, 2048},
    {"documents", 1, 16, 8, 32768, 128, 2048},  {"dense_masks", 1, 2, 1, 32768, 64, 1024},
    {"dense_masks", 1, 2, 2, 32768, 64, 1024},  {"dense_masks", 1, 8, 4, 8192, 128, 2048},
    {"dense_masks", 1, 8, 8, 4096, 128, 2048},
};

__host__ __device__ std::uint64_t mix(std::uint64_t x) {
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

Problem problem_of(const Case& c) {
  return {.batch = c.batch,
          .heads_q = c.heads_q,
          .heads_kv = c.heads_kv,
          .seqlen_q = c.seqlen,
          .seqlen_k = c.seqlen,
          .head_dim = c.head_dim,
          .dtype = DType::bf16,
          .device = Device::cuda,
          .scale = default_scale(c.head_dim),
          .causal = true};
}

std::string title_of(const Case& c) { return title(c.kind, problem_of(c), c.window); }

Bf16* normal(Arena& arena, std::int64_t count, std::uint64_t seed) {
  Bf16* values = arena.take<Bf16>(count);
  cuda::for_each(count, FillNormal{values, seed}, nullptr);
  return values;
}

const KeyInterval* select(const Problem& p, int window, const Bf16* scores, Arena& arena) {
  SelectionArgs args{.device = Device::cuda,
                     .batch = p.batch,
                     .heads = p.heads_kv,
                     .seqlen_q = p.seqlen_q,
                     .seqlen_k = p.seqlen_k,
                     .rule = {.window = window},
                     .scores = scores,
                     .scores_dtype = DType::bf16,
                     .intervals = arena.take<KeyInterval>(p.batch * p.heads_kv * p.seqlen_k)};
  Execution execution;
  execution.workspace_bytes = select_workspace_size(args, execution);
  execution.workspace = arena.bytes(execution.workspace_bytes).data();
  select_key_intervals(args, execution);
  return args.intervals;
}

// A sliding window, or documents one after the other.
const KeyInterval* consecutive(const Problem& p, const Case& c, Arena& arena) {
  std::vector<KeyInterval> intervals(static_cast<std::size_t>(p.batch * p.heads_kv * p.seqlen_k));
  for (std::size_t i = 0; i < intervals.size(); ++i) {
    const int key = static_cast<int>(i % static_cast<std::size_t>(c.seqlen));
    const int last = c.kind == "sliding" ? key + c.window : (key / c.window + 1) * c.window;
    intervals[i] = {key, std::min(last, c.seqlen)};
  }
  return arena.copy(intervals);
}

Schedule schedule_of(const Problem& p, const Visibility& visibility, Direction direction,
                     Arena& arena) {
  const ScheduleCall call(p, visibility, direction, Execution(), "cuda");
  return call.build(arena.bytes(call.size()), arena.bytes(call.workspace_size()));
}

// The tensors of a case, and its calls.
class Attention {
 public:
  explicit Attention(const Case& c) {
    Problem p = problem_of(c);
    const std::int64_t rows = p.batch * p.seqlen_q, q_size = rows * p.heads_q * p.head_dim,
                       kv_size = rows * p.heads_kv * p.head_dim;
    const auto q_stride = contiguous_strides({p.batch, p.seqlen_q, p.heads_q, p.head_dim});
    const auto kv_stride = contiguous_strides({p.batch, p.seqlen_k, p.heads_kv, p.head_dim});
    Inputs in;
    in.q = {normal(arena_, q_size, 1), q_stride};
    in.k = {normal(arena_, kv_size, 2), kv_stride};
    in.v = {normal(arena_, kv_size, 3), kv_stride};

    Tensor4 dbias;
    const bool dense_masks = c.kind == "dense_masks";
    if (dense_masks || c.kind == "per_query") {
      p.bias_shape = {p.batch, p.heads_kv, dense_masks ? p.seqlen_q : 1, p.seqlen_k};
      p.bias_dtype = DType::bf16;
      auto stride = contiguous_strides(p.bias_shape);
      if (!dense_masks) stride[2] = 0;
      const std::int64_t size = p.batch * p.heads_kv * p.bias_shape[2] * p.seqlen_k;
      in.bias = {normal(arena_, size, 4), stride};
      dbias = {arena_.take<Bf16>(size), stride};
      if (dense_masks) {
        auto* mask = arena_.take<std::uint8_t>(size);
        cuda::for_each(size, FillMask{mask, c.seqlen, c.window}, nullptr);
        p.mask_shape = p.bias_shape;
        in.mask = {mask, stride};
      }
    }
    if (c.window > 0 && !dense_masks) {
      const bool selected = c.kind == "per_query";
      p.intervals_shape = {p.batch, p.heads_kv};
      in.visibility.intervals.data =
          selected ? select(p, c.window, static_cast<const Bf16*>(in.bias.data), arena_)
                   : consecutive(p, c, arena_);
      in.visibility.bound = {.base = c.window, .per_query = 1, .consecutive = !selected};
    }

    const std::int64_t lse_size = p.batch * p.heads_q * p.seqlen_q;
    forward_ = ForwardArgs{.problem = p,
                           .in = in,
                           .schedule = schedule_of(p, in.visibility, Direction::forward, arena_),
                           .out = {arena_.take<Bf16>(q_size), q_stride},
                           .lse = arena_.take<float>(lse_size),
                           .lse_low = arena_.take<float>(lse_size)};
    backward_ = BackwardArgs{.problem = p,
                             .in = in,
                             .schedule = schedule_of(p, in.visibility, Direction::backward, arena_),
                             .out = forward_.out,
                             .lse = forward_.lse,
                             .lse_low = forward_.lse_low,
                             .dout = {normal(arena_, q_size, 5), q_stride},
                             .dq = {arena_.take<Bf16>(q_size), q_stride},
                             .dk = {arena_.take<Bf16>(kv_size), kv_stride},
                             .dv = {arena_.take<Bf16>(kv_size), kv_stride},
                             .dbias = dbias};
  }

  void forward(::benchmark::State& state) { run(state, forward_); }
  void backward(::benchmark::State& state) { run(state, backward_); }
  void deterministic_backward(::benchmark::State& state) {
    Arena arena;
    BackwardArgs args = backward_;
    args.problem.deterministic = true;
    args.schedule = schedule_of(args.problem, args.in.visibility, Direction::backward, arena);
    run(state, args);
  }

 private:
  template <class Args>
  void run(::benchmark::State& state, const Args& args) {
    const CheckedCall<Args> call(args, Execution(), "cuda");
    Arena arena;
    const auto workspace = arena.bytes(call.workspace_size());
    time(state, nullptr, 1, [&] { call.run(workspace); });
  }

  Arena arena_;
  ForwardArgs forward_;
  BackwardArgs backward_;
};

}  // namespace
}  // namespace flash_dmattn::bench

int main(int argc, char** argv) {
  using namespace flash_dmattn::bench;
  constexpr std::pair<const char*, void (Attention::*)(::benchmark::State&)> parts[] = {
      {"forward", &Attention::forward},
      {"backward", &Attention::backward},
      {"deterministic backward", &Attention::deterministic_backward}};
  for (const Case& c : cases) {
    for (const auto& [part, run] : parts) {
      add(name(title_of(c), flash_dmattn::DType::bf16, part),
          [&c, run = run](::benchmark::State& state) { (setup_of<Attention>(c).*run)(state); });
    }
  }
  return run_all(argc, argv);
}
