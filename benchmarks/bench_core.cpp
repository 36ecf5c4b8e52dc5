// Times select, forward and backward of causal dynamic mask attention (per_query selection, a
// bias of one score per key, its gradient included), without torch or Python, for profilers:
//
//   cmake --preset bench && cmake --build --preset bench
//   build/bench/benchmarks/bench_core --benchmark_filter=D64.*bfloat16/backward

#include <benchmark/benchmark.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench.h"
#include "common/float_types.h"
#include "flash_dmattn/calls.h"
#include "flash_dmattn/flash_dmattn.h"
#include "memory.h"

namespace fd = flash_dmattn;

namespace {

struct Case {
  fd::DType dtype;
  std::int64_t seqlen, head_dim, window;
  std::int64_t batch = 1, heads_q = 8, heads_kv = 8;
};

constexpr Case cases[] = {
    {fd::DType::f32, 8192, 64, 1024},   {fd::DType::bf16, 8192, 64, 1024},
    {fd::DType::f16, 8192, 64, 1024},   {fd::DType::bf16, 8192, 128, 1024},
    {fd::DType::bf16, 32768, 64, 1024},
};

// Elements of one dtype, in bytes.
using Elements = std::vector<std::byte>;

Elements empty(std::int64_t size, fd::DType dtype) {
  return Elements(static_cast<std::size_t>(size * fd::size_of(dtype)));
}

Elements random(std::int64_t size, fd::DType dtype, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  Elements elements = empty(size, dtype);
  std::byte* out = elements.data();
  for (std::int64_t i = 0; i < size; ++i, out += fd::size_of(dtype)) {
    const float value = normal(generator);
    if (dtype == fd::DType::f32) {
      std::memcpy(out, &value, sizeof value);
    } else {
      const std::uint16_t bits =
          dtype == fd::DType::bf16 ? fd::float_to_bf16(value) : fd::float_to_f16(value);
      std::memcpy(out, &bits, sizeof bits);
    }
  }
  return elements;
}

fd::Problem problem_of(const Case& c) {
  return {
      .batch = c.batch,
      .heads_q = c.heads_q,
      .heads_kv = c.heads_kv,
      .seqlen_q = c.seqlen,
      .seqlen_k = c.seqlen,
      .head_dim = c.head_dim,
      .dtype = c.dtype,
      .scale = fd::default_scale(c.head_dim),
      .causal = true,
      .bias_shape = {c.batch, c.heads_kv, 1, c.seqlen},
      .bias_dtype = c.dtype,
      .intervals_shape = {c.batch, c.heads_kv},
  };
}

// The tensors of a case, and its calls.
class Attention {
 public:
  explicit Attention(const Case& c) : problem_(problem_of(c)) {
    std::mt19937 generator(0);
    const std::int64_t q_size = c.batch * c.seqlen * c.heads_q * c.head_dim;
    const std::int64_t kv_size = c.batch * c.seqlen * c.heads_kv * c.head_dim;
    const std::int64_t keys_size = c.batch * c.heads_kv * c.seqlen;
    for (Elements* t : {&q_, &dout_}) *t = random(q_size, c.dtype, generator);
    for (Elements* t : {&k_, &v_}) *t = random(kv_size, c.dtype, generator);
    bias_ = random(keys_size, c.dtype, generator);
    for (Elements* t : {&out_, &dq_}) *t = empty(q_size, c.dtype);
    for (Elements* t : {&dk_, &dv_}) *t = empty(kv_size, c.dtype);
    dbias_ = empty(keys_size, c.dtype);
    lse_.resize(static_cast<std::size_t>(c.batch * c.heads_q * c.seqlen));
    intervals_.resize(static_cast<std::size_t>(keys_size));

    selection_ = {
        .batch = c.batch,
        .heads = c.heads_kv,
        .seqlen_q = c.seqlen,
        .seqlen_k = c.seqlen,
        .rule = {.window = c.window},
        .scores = bias_.data(),
        .scores_dtype = c.dtype,
        .intervals = intervals_.data(),
    };
    const auto q_stride = fd::contiguous_strides({c.batch, c.seqlen, c.heads_q, c.head_dim});
    const auto kv_stride = fd::contiguous_strides({c.batch, c.seqlen, c.heads_kv, c.head_dim});
    const std::array<std::int64_t, 4> bias_stride = {c.heads_kv * c.seqlen, c.seqlen, 0, 1};
    const fd::Inputs in = {
        .q = {q_.data(), q_stride},
        .k = {k_.data(), kv_stride},
        .v = {v_.data(), kv_stride},
        .bias = {bias_.data(), bias_stride},
        .visibility = {.intervals = {intervals_.data()}},
    };
    select();
    const fd::ForwardArgs forward = {
        .problem = problem_, .in = in, .out = {out_.data(), q_stride}, .lse = lse_.data()};
    forward_ = std::make_unique<fd::ForwardCall>(forward, execution_);
    backward_ = std::make_unique<fd::BackwardCall>(
        fd::BackwardArgs{
            .problem = problem_,
            .in = in,
            .out = forward.out,
            .lse = lse_.data(),
            .dout = {dout_.data(), q_stride},
            .dq = {dq_.data(), q_stride},
            .dk = {dk_.data(), kv_stride},
            .dv = {dv_.data(), kv_stride},
            .dbias = {dbias_.data(), bias_stride},
        },
        execution_);
    forward_run();
  }

  void select() {
    const fd::SelectCall call(selection_, execution_);
    call.run(workspace_.of(call.workspace_size()));
  }

  void forward_run() { forward_->run(workspace_.of(forward_->workspace_size())); }
  void backward_run() { backward_->run(workspace_.of(backward_->workspace_size())); }

 private:
  fd::ThreadPool pool_{0};
  fd::Execution execution_ = pool_.execution();
  fd::Problem problem_;
  Elements q_, k_, v_, bias_, dout_, out_, dq_, dk_, dv_, dbias_;
  std::vector<float> lse_;
  std::vector<fd::KeyInterval> intervals_;
  Memory workspace_;
  fd::SelectionArgs selection_;
  std::unique_ptr<fd::ForwardCall> forward_;
  std::unique_ptr<fd::BackwardCall> backward_;
};

}  // namespace

int main(int argc, char** argv) {
  constexpr std::pair<const char*, void (Attention::*)()> parts[] = {
      {"select", &Attention::select},
      {"forward", &Attention::forward_run},
      {"backward", &Attention::backward_run}};
  for (const Case& c : cases) {
    const std::string title = fd::bench::title("per_query", problem_of(c), c.window);
    for (const auto& [part, run] : parts) {
      benchmark::RegisterBenchmark(fd::bench::name(title, c.dtype, part).c_str(),
                                   [&c, run = run](benchmark::State& state) {
                                     Attention& attention = fd::bench::setup_of<Attention>(c);
                                     for (auto _ : state) (attention.*run)();
                                   })
          ->Unit(benchmark::kMillisecond)
          ->Iterations(1)
          ->UseRealTime();
    }
  }
  return fd::bench::run_all(argc, argv);
}
