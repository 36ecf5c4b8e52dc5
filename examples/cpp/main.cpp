// Dynamic mask attention, forward and backward, on random data: scores -> key intervals -> attention. The caller owns
// all memory, and passes threads, workspace and outputs.

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

// One layer's data. The bias is one learned score per key: it chooses the keys, and it is added to the attention score.
struct Layer {
  std::vector<float> q, k, v, dout, bias;

  explicit Layer(std::mt19937& generator)
      : q(random_vector(batch * seqlen * heads_q * head_dim, generator)),
        k(random_vector(batch * seqlen * heads_kv * head_dim, generator)),
        v(random_vector(batch * seqlen * heads_kv * head_dim, generator)),
        dout(random_vector(batch * seqlen * heads_q * head_dim, generator)),
        bias(random_vector(batch * heads_kv * seqlen, generator)) {}
};

const auto q_stride = fd::contiguous_strides({batch, seqlen, heads_q, head_dim});
const auto kv_stride = fd::contiguous_strides({batch, seqlen, heads_kv, head_dim});
const auto bias_stride = fd::contiguous_strides({batch, heads_kv, 1, seqlen});

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

// Scores -> the interval of queries in which each key is visible.
fd::KeyBound select_keys(const std::vector<float>& scores, std::vector<fd::KeyInterval>& intervals,
                         const fd::Execution& threads, Memory& workspace) {
  const fd::SelectionArgs selection = {
      .batch = batch,
      .heads = heads_kv,
      .seqlen_q = seqlen,
      .seqlen_k = seqlen,
      .rule = {.window = window},
      .scores = scores.data(),
      .scores_dtype = fd::DType::f32,
      .intervals = intervals.data(),
  };
  const fd::SelectCall call(selection, threads);
  call.run(workspace.of(call.workspace_size()));
  return fd::key_bound(selection);
}

void attend(const fd::ForwardArgs& forward, const fd::Execution& threads, Memory& workspace) {
  const fd::ForwardCall call(forward, threads);
  call.run(workspace.of(call.workspace_size()));
}

void attend_backward(const fd::BackwardArgs& backward, const fd::Execution& threads,
                     Memory& workspace) {
  const fd::BackwardCall call(backward, threads);
  call.run(workspace.of(call.workspace_size()));
}

void print_backends() {
  for (const fd::BackendInfo& backend : fd::backends()) {
    std::printf("backend %.*s: %s\n", static_cast<int>(backend.name.size()), backend.name.data(),
                backend.reason.c_str());
  }
}

// Forward and backward of a layer; false if an element of a result is not finite.
bool compute_layer(const Layer& layer) {
  fd::ThreadPool pool;
  const fd::Execution threads = pool.execution();
  Memory workspace;

  std::vector<fd::KeyInterval> intervals(layer.bias.size());
  const fd::KeyBound bound = select_keys(layer.bias, intervals, threads, workspace);
  const fd::Inputs inputs = {
      .q = {layer.q.data(), q_stride},
      .k = {layer.k.data(), kv_stride},
      .v = {layer.v.data(), kv_stride},
      .bias = {layer.bias.data(), bias_stride},
      .visibility = {.intervals = {intervals.data()}, .bound = bound},
  };

  std::vector<float> out(layer.q.size());
  std::vector<float> lse(static_cast<std::size_t>(batch * heads_q * seqlen));
  const fd::ForwardArgs forward = {
      .problem = problem,
      .in = inputs,
      .out = {out.data(), q_stride},
      .lse = lse.data(),
  };
  attend(forward, threads, workspace);

  std::vector<float> dq(out.size()), dk(layer.k.size()), dv(layer.v.size()),
      dbias(layer.bias.size());
  const fd::BackwardArgs backward = {
      .problem = problem,
      .in = inputs,
      .out = forward.out,
      .lse = lse.data(),
      .dout = {layer.dout.data(), q_stride},
      .dq = {dq.data(), q_stride},
      .dk = {dk.data(), kv_stride},
      .dv = {dv.data(), kv_stride},
      .dbias = {dbias.data(), bias_stride},
  };
  attend_backward(backward, threads, workspace);

  std::printf("%lld queries, %lld keys visible to each\n", static_cast<long long>(seqlen),
              static_cast<long long>(window));
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
    std::mt19937 generator(0);
    const Layer layer(generator);
    print_backends();
    return compute_layer(layer) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
