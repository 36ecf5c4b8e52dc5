// Times select, schedule, forward and backward of causal dynamic mask attention (per_query selection, a
// bias of one score per key, its gradient included), without torch or Python, for profilers:
//
//   cmake --preset bench && cmake --build --preset bench
//   build/bench/benchmarks/bench_core n=8192 d=64 w=1024 dtype=bf16 threads=2
//
// It prints the median of `repeats` runs after one warm-up. A TFLOP/s counts visible
// (query, key) elements only: 4 D flops for each, per query head, forward, 10 D backward.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "flash_dmattn/flash_dmattn.h"
#include "float_types.h"

namespace fd = flash_dmattn;

namespace {

// The name=value arguments; every one has a default.
class Options {
 public:
  explicit Options(std::span<char*> arguments) {
    for (const std::string_view argument : arguments) {
      const std::size_t equals = argument.find('=');
      const auto known = values_.find(std::string(argument.substr(0, equals)));
      if (equals == std::string_view::npos || known == values_.end()) {
        throw std::invalid_argument("'" + std::string(argument) + "': expected " + help());
      }
      known->second = argument.substr(equals + 1);
    }
  }

  const std::string& text(const std::string& name) const { return values_.at(name); }
  std::int64_t number(const std::string& name) const { return std::stoll(values_.at(name)); }

 private:
  std::string help() const {
    std::string text;
    for (const auto& [name, value] : values_) text += " " + name + "=" + value;
    return text.substr(1);
  }

  std::map<std::string, std::string> values_ = {
      {"b", "1"},    {"h", "8"},       {"hkv", "8"},     {"n", "8192"},    {"d", "64"},
      {"w", "1024"}, {"dtype", "f32"}, {"threads", "0"}, {"repeats", "7"}, {"backend", ""},
  };
};

fd::DType dtype_of(const std::string& name) {
  for (const fd::DType dtype : {fd::DType::f32, fd::DType::bf16, fd::DType::f16}) {
    if (name == fd::name_of(dtype)) return dtype;
  }
  throw std::invalid_argument("dtype: got '" + name + "', expected f32, bf16 or f16");
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

  int threads() const { return pool_.threads(); }
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
  for (std::int64_t i = 0; i < std::max<std::int64_t>(repeats, 1); ++i) {
    const auto start = Clock::now();
    function();
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
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
  std::int64_t pairs = 0;  // of all kv heads
  for (const fd::KeyInterval& interval : intervals) {
    pairs += std::max(interval.last - interval.first, 0);
  }

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

  for (const fd::BackendInfo& info : fd::backends()) {
    std::printf("%s: %s\n", std::string(info.name).c_str(), info.reason.c_str());
  }
  const auto dense_pairs = static_cast<double>(batch * heads_kv) * static_cast<double>(seqlen) *
                           static_cast<double>(seqlen + 1) / 2;
  std::printf("%d threads, %lld visible pairs (%.1f %% of causal), schedule of %zu bytes\n",
              runner.threads(), static_cast<long long>(pairs),
              100 * static_cast<double>(pairs) / dense_pairs, schedule.bytes());
  const double flops = static_cast<double>(pairs * (heads_q / heads_kv) * head_dim);
  std::printf("select    %9.3f ms\n", select_ms);
  std::printf("schedule  %9.3f ms\n", schedule_ms);
  std::printf("forward   %9.3f ms  %.3f TFLOP/s\n", forward_ms, 4 * flops / forward_ms * 1e-9);
  std::printf("backward  %9.3f ms  %.3f TFLOP/s\n", backward_ms, 10 * flops / backward_ms * 1e-9);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(Options({argv + 1, static_cast<std::size_t>(argc - 1)}));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
