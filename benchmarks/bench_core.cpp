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
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench.h"
#include "flash_dmattn/calls.h"
#include "flash_dmattn/flash_dmattn.h"
#include "float_types.h"
#include "memory.h"

namespace fd = flash_dmattn;
namespace bench = flash_dmattn::benchmark;

namespace {

using Options = std::map<std::string, std::string>;

// The arguments of the form name=value; every one has a default.
Options parse(std::span<char*> arguments) {
  Options options = {{"b", "1"},       {"h", "8"},     {"hkv", "8"},     {"n", "8192"},
                     {"d", "64"},      {"w", "1024"},  {"dtype", "f32"}, {"threads", "0"},
                     {"repeats", "7"}, {"backend", ""}};
  for (const std::string argument : arguments) {
    const auto known = options.find(argument.substr(0, argument.find('=')));
    if (known == options.end() || argument.size() <= known->first.size()) {
      std::string expected;
      for (const auto& [name, value] : options) expected += " " + name + "=" + value;
      throw std::invalid_argument("got " + argument + ", expected" + expected);
    }
    known->second = argument.substr(known->first.size() + 1);
  }
  return options;
}

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
  const auto number = [&](const char* name) { return std::stoll(options.at(name)); };
  const std::int64_t batch = number("b"), heads_q = number("h"), heads_kv = number("hkv");
  const std::int64_t seqlen = number("n"), head_dim = number("d"), window = number("w");
  const std::int64_t repeats = number("repeats");
  const fd::DType dtype = dtype_of(options.at("dtype"));
  const std::string& backend = options.at("backend");

  std::mt19937 generator(0);
  const std::int64_t q_size = batch * seqlen * heads_q * head_dim;
  const std::int64_t kv_size = batch * seqlen * heads_kv * head_dim;
  const std::int64_t keys_size = batch * heads_kv * seqlen;
  const Elements q = random(q_size, dtype, generator), dout = random(q_size, dtype, generator);
  const Elements k = random(kv_size, dtype, generator), v = random(kv_size, dtype, generator);
  const Elements bias = random(keys_size, dtype, generator);

  fd::ThreadPool pool(static_cast<int>(number("threads")));
  fd::Execution execution = pool.execution();
  Memory workspace, schedule_memory;

  std::vector<fd::KeyInterval> intervals(static_cast<std::size_t>(keys_size));
  const fd::SelectionArgs selection = {
      .batch = batch,
      .heads = heads_kv,
      .seqlen_q = seqlen,
      .seqlen_k = seqlen,
      .keep = {.window = window},
      .scores = bias.data(),
      .scores_dtype = dtype,
      .intervals = intervals.data(),
  };
  execution.workspace_bytes = fd::select_workspace_size(selection, execution);
  execution.workspace = workspace.of(execution.workspace_bytes).data();
  const double select_ms =
      measure(repeats, [&] { fd::select_key_intervals(selection, execution); });

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
  const fd::ScheduleCall scheduling(problem, inputs.visibility, fd::Direction::forward, execution,
                                    backend);
  fd::Schedule schedule;
  const double schedule_ms = measure(repeats, [&] {
    schedule = scheduling.build(schedule_memory.of(scheduling.size()),
                                workspace.of(scheduling.workspace_size()));
  });

  const auto time = [&]<class Args>(const Args& args) {
    const fd::CheckedCall<Args> call(args, execution, backend);
    return measure(repeats, [&] { call.run(workspace.of(call.workspace_size())); });
  };
  Elements out = empty(q_size, dtype);
  std::vector<float> lse(static_cast<std::size_t>(batch * heads_q * seqlen));
  const fd::ForwardArgs forward = {.problem = problem,
                                   .in = inputs,
                                   .schedule = schedule,
                                   .out = {out.data(), q_stride},
                                   .lse = lse.data()};
  const double forward_ms = time(forward);

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
  bench::print({.title = bench::title("per_query", problem, window),
                .side = "cpu",
                .dtype = dtype,
                .forward = forward_ms,
                .backward = time(backward),
                .parts = {{"select", select_ms}, {"schedule", schedule_ms}}});
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_main([&] { run(parse({argv + 1, static_cast<std::size_t>(argc - 1)})); });
}
