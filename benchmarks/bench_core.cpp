// Times select, schedule, forward and backward of causal dynamic mask attention (per_query selection, a
// bias of one score per key, its gradient included), without torch or Python, for profilers:
//
//   cmake --preset bench && cmake --build --preset bench
//   build/bench/benchmarks/bench_core n=8192 d=64 w=1024 dtype=bf16 threads=2
//
// A time is the median of `repeats` runs after one warm-up.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "bench.h"
#include "flash_dmattn/flash_dmattn.h"
#include "float_types.h"

namespace fd = flash_dmattn;
namespace bench = flash_dmattn::benchmark;

namespace {

// The arguments of the form name=value; every one has a default.
class Options {
 public:
  explicit Options(std::span<char*> arguments) {
    for (const std::string_view argument : arguments) {
      const std::size_t equals = argument.find('=');
      const auto known = values_.find(std::string(argument.substr(0, equals)));
      if (equals == std::string_view::npos || known == values_.end()) {
        std::string expected;
        for (const auto& [name, value] : values_) expected += " " + name + "=" + value;
        throw std::invalid_argument("got " + std::string(argument) + ", expected" + expected);
      }
      known->second = argument.substr(equals + 1);
    }
  }

  const std::string& text(const std::string& name) const { return values_.at(name); }
  std::int64_t number(const std::string& name) const { return std::stoll(values_.at(name)); }

 private:
  std::map<std::string, std::string> values_ = {
      {"b", "1"},    {"h", "8"},       {"hkv", "8"},     {"n", "8192"},    {"d", "64"},
      {"w", "1024"}, {"dtype", "f32"}, {"threads", "0"}, {"repeats", "7"}, {"backend", ""},
  };
};

fd::DType dtype_of(const std::string& name) {
  for (const fd::DType dtype : {fd::DType::f32, fd::DType::bf16, fd::DType::f16}) {
    if (name == fd::name_of(dtype)) return dtype;
  }
  throw std::invalid_argument("dtype: got " + name + ", expected f32, bf16 or f16");
}

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

// Aligned memory that grows to the largest requested piece.
class Memory {
 public:
  std::span<std::byte> of(std::size_t bytes) {
    storage_.resize(std::max(storage_.size(), bytes + fd::workspace_alignment));
    void* aligned = storage_.data();
    std::size_t space = storage_.size();
    std::align(fd::workspace_alignment, bytes, aligned, space);
    return {static_cast<std::byte*>(aligned), bytes};
  }

 private:
  std::vector<std::byte> storage_;
};

// An Execution with the workspace of its last call.
class Runner {
 public:
  explicit Runner(int threads) : pool_(threads) {}

  fd::Execution execution() { return pool_.execution(); }

  fd::Execution with(std::size_t bytes) {
    const std::span<std::byte> workspace = memory_.of(bytes);
    fd::Execution execution = pool_.execution();
    execution.workspace = workspace.data();
    execution.workspace_bytes = workspace.size();
    return execution;
  }

 private:
  fd::ThreadPool pool_;
  Memory memory_;
};

// Milliseconds, the median.
template <class Function>
double measure(std::int64_t repeats, Function&& function) {
  using Clock = std::chrono::steady_clock;
  function();
  std::vector<double> times;
  for (std::int64_t i = 0; i < repeats; ++i) {
    const auto start = Clock::now();
    function();
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  return bench::median(times);
}

void run(const Options& options) {
  const std::int64_t batch = options.number("b"), heads_q = options.number("h");
  const std::int64_t heads_kv = options.number("hkv"), seqlen = options.number("n");
  const std::int64_t head_dim = options.number("d"), repeats = options.number("repeats");
  const fd::DType dtype = dtype_of(options.text("dtype"));
  const std::string& backend = options.text("backend");

  std::mt19937 generator(0);
  const std::int64_t q_size = batch * seqlen * heads_q * head_dim;
  const std::int64_t kv_size = batch * seqlen * heads_kv * head_dim;
  const std::int64_t keys_size = batch * heads_kv * seqlen;
  const Elements q = random(q_size, dtype, generator), dout = random(q_size, dtype, generator);
  const Elements k = random(kv_size, dtype, generator), v = random(kv_size, dtype, generator);
  const Elements bias = random(keys_size, dtype, generator);

  Runner runner(static_cast<int>(options.number("threads")));

  std::vector<fd::KeyInterval> intervals(static_cast<std::size_t>(keys_size));
  const fd::SelectionArgs selection = {
      .batch = batch,
      .heads = heads_kv,
      .seqlen_q = seqlen,
      .seqlen_k = seqlen,
      .window = options.number("w"),
      .scores = bias.data(),
      .scores_dtype = dtype,
      .intervals = intervals.data(),
  };
  const double select_ms = measure(repeats, [&] {
    fd::select_key_intervals(selection,
                             runner.with(fd::select_workspace_size(selection, runner.execution())));
  });

  const fd::Problem problem = {
      .batch = batch,
      .heads_q = heads_q,
      .heads_kv = heads_kv,
      .seqlen_q = seqlen,
      .seqlen_k = seqlen,
      .head_dim = head_dim,
      .dtype = dtype,
      .scale = fd::default_scale(head_dim),
      .causal = true,
      .bias_shape = {batch, heads_kv, 1, seqlen},
      .bias_dtype = dtype,
      .intervals_shape = {batch, heads_kv},
  };
  const auto q_stride = fd::contiguous_strides({batch, seqlen, heads_q, head_dim});
  const auto kv_stride = fd::contiguous_strides({batch, seqlen, heads_kv, head_dim});
  const std::array<std::int64_t, 4> bias_stride = {heads_kv * seqlen, seqlen, 0, 1};
  const fd::Inputs inputs = {
      .q = {q.data(), q_stride},
      .k = {k.data(), kv_stride},
      .v = {v.data(), kv_stride},
      .bias = {bias.data(), bias_stride},
      .visibility = {.intervals = {intervals.data()}},
  };

  // The CPU's schedule serves both directions.
  const fd::Visibility& visibility = inputs.visibility;
  constexpr fd::Direction direction = fd::Direction::forward;
  Memory memory;
  fd::Schedule schedule;
  const double schedule_ms = measure(repeats, [&] {
    const auto bytes =
        fd::schedule_size(problem, visibility, direction, runner.execution(), backend);
    const auto execution = runner.with(
        fd::schedule_workspace_size(problem, visibility, direction, runner.execution(), backend));
    schedule =
        fd::build_schedule(problem, visibility, direction, memory.of(bytes), execution, backend);
  });

  Elements out = empty(q_size, dtype);
  std::vector<float> lse(static_cast<std::size_t>(batch * heads_q * seqlen));
  const fd::ForwardArgs forward = {.problem = problem,
                                   .in = inputs,
                                   .schedule = schedule,
                                   .out = {out.data(), q_stride},
                                   .lse = lse.data()};
  const double forward_ms = measure(repeats, [&] {
    const auto bytes = fd::forward_workspace_size(forward, runner.execution(), backend);
    fd::forward(forward, runner.with(bytes), backend);
  });

  Elements dq = empty(q_size, dtype), dk = empty(kv_size, dtype), dv = empty(kv_size, dtype);
  Elements dbias = empty(keys_size, dtype);
  const fd::BackwardArgs backward = {
      .problem = problem,
      .in = inputs,
      .schedule = schedule,
      .out = forward.out,
      .lse = lse.data(),
      .dout = {dout.data(), q_stride},
      .dq = {dq.data(), q_stride},
      .dk = {dk.data(), kv_stride},
      .dv = {dv.data(), kv_stride},
      .dbias = {dbias.data(), bias_stride},
  };
  const double backward_ms = measure(repeats, [&] {
    const auto bytes = fd::backward_workspace_size(backward, runner.execution(), backend);
    fd::backward(backward, runner.with(bytes), backend);
  });

  bench::print({.title = bench::title("per_query", problem, options.number("w")),
                .side = "cpu",
                .dtype = dtype,
                .forward = forward_ms,
                .backward = backward_ms,
                .parts = {{"select", select_ms}, {"schedule", schedule_ms}}});
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_main([&] { run(Options({argv + 1, static_cast<std::size_t>(argc - 1)})); });
}
