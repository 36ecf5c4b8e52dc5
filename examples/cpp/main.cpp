// Dynamic mask attention, forward and backward, on random data: scores -> key intervals -> schedule ->
// attention. The caller owns all memory; the library is told where to compute and where to write.

#include <flash_dmattn/flash_dmattn.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <span>
#include <vector>

#include "memory.h"

namespace fd = flash_dmattn;

namespace {

constexpr std::int64_t batch = 1, heads_q = 4, heads_kv = 2, seqlen = 1024, head_dim = 64;
constexpr std::int64_t window = 128;  // keys that each query sees

std::vector<float> random_vector(std::int64_t size, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(size));
  for (float& value : values) value = normal(generator);
  return values;
}

// Prints the largest magnitude; false if an element is not finite.
bool report(const char* name, const std::vector<float>& values) {
  float largest = 0;
  bool finite = true;
  for (const float value : values) {
    largest = std::max(largest, std::abs(value));
    finite = finite && std::isfinite(value);
  }
  std::printf("%-6s first %+.6f  max |.| %.6f  %s\n", name, static_cast<double>(values[0]),
              static_cast<double>(largest), finite ? "finite" : "NOT FINITE");
  return finite;
}

bool run() {
  std::mt19937 generator(0);
  const std::int64_t q_size = batch * seqlen * heads_q * head_dim;
  const std::int64_t kv_size = batch * seqlen * heads_kv * head_dim;
  const auto q = random_vector(q_size, generator);
  const auto k = random_vector(kv_size, generator);
  const auto v = random_vector(kv_size, generator);
  const auto dout = random_vector(q_size, generator);
  // One learned score per key: it chooses the keys, and it is added to the attention score.
  const auto bias = random_vector(batch * heads_kv * seqlen, generator);

  fd::ThreadPool pool;
  const fd::Execution threads = pool.execution();
  Memory workspace;

  // Scores -> the interval of queries in which each key is visible.
  std::vector<fd::KeyInterval> intervals(bias.size());
  const fd::SelectionArgs selection = {
      .batch = batch,
      .heads = heads_kv,
      .seqlen_q = seqlen,
      .seqlen_k = seqlen,
      .rule = {.window = window},
      .scores = bias.data(),
      .scores_dtype = fd::DType::f32,
      .intervals = intervals.data(),
  };
  fd::Execution selecting = threads;
  selecting.workspace_bytes = fd::select_workspace_size(selection, threads);
  selecting.workspace = workspace.of(selecting.workspace_bytes).data();
  fd::select_key_intervals(selection, selecting);

  // The problem and its data.
  const fd::Problem problem = {
      .batch = batch,
      .heads_q = heads_q,
      .heads_kv = heads_kv,
      .seqlen_q = seqlen,
      .seqlen_k = seqlen,
      .head_dim = head_dim,
      .dtype = fd::DType::f32,
      .scale = fd::default_scale(head_dim),
      .causal = true,
      .bias_shape = {batch, heads_kv, 1, seqlen},
      .bias_dtype = fd::DType::f32,
      .intervals_shape = {batch, heads_kv},
  };
  const auto q_stride = fd::contiguous_strides({batch, seqlen, heads_q, head_dim});
  const auto kv_stride = fd::contiguous_strides({batch, seqlen, heads_kv, head_dim});
  const auto bias_stride = fd::contiguous_strides(problem.bias_shape);
  const fd::Inputs inputs = {
      .q = {q.data(), q_stride},
      .k = {k.data(), kv_stride},
      .v = {v.data(), kv_stride},
      .bias = {bias.data(), bias_stride},
      .visibility = {.intervals = {intervals.data()}, .bound = fd::key_bound(selection)},
  };

  // The schedule of the visible keys, for each direction.
  const auto schedule_in = [&](Memory& memory, fd::Direction direction) {
    const fd::ScheduleCall call(problem, inputs.visibility, direction, threads);
    return call.build(memory.of(call.size()), workspace.of(call.workspace_size()));
  };
  Memory forward_memory, backward_memory;

  std::vector<float> out(q.size());
  std::vector<float> lse(static_cast<std::size_t>(batch * heads_q * seqlen));
  const fd::ForwardArgs forward = {
      .problem = problem,
      .in = inputs,
      .schedule = schedule_in(forward_memory, fd::Direction::forward),
      .out = {out.data(), q_stride},
      .lse = lse.data(),
  };
  const fd::ForwardCall forward_call(forward, threads);
  forward_call.run(workspace.of(forward_call.workspace_size()));

  std::vector<float> dq(q.size()), dk(k.size()), dv(v.size()), dbias(bias.size());
  const fd::BackwardArgs backward = {
      .problem = problem,
      .in = inputs,
      .schedule = forward.schedule.serves(fd::Direction::backward)
                      ? forward.schedule
                      : schedule_in(backward_memory, fd::Direction::backward),
      .out = forward.out,
      .lse = lse.data(),
      .dout = {dout.data(), q_stride},
      .dq = {dq.data(), q_stride},
      .dk = {dk.data(), kv_stride},
      .dv = {dv.data(), kv_stride},
      .dbias = {dbias.data(), bias_stride},
  };
  const fd::BackwardCall backward_call(backward, threads);
  backward_call.run(workspace.of(backward_call.workspace_size()));

  for (const fd::BackendInfo& backend : fd::backends()) {
    std::printf("backend %.*s: %s\n", static_cast<int>(backend.name.size()), backend.name.data(),
                backend.reason.c_str());
  }
  std::printf("%lld queries, %lld keys visible to each, a schedule of %zu bytes\n",
              static_cast<long long>(seqlen), static_cast<long long>(window),
              forward.schedule.bytes());
  bool finite = true;
  finite &= report("out", out);
  finite &= report("lse", lse);
  finite &= report("dq", dq);
  finite &= report("dk", dk);
  finite &= report("dv", dv);
  finite &= report("dbias", dbias);
  return finite;
}

}  // namespace

int main() {
  try {
    return run() ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
