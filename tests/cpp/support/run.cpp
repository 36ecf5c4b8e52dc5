#include "support/run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace flash_dmattn::testing {
namespace {

void expect_gaps_intact(const Tensor& tensor) {
  EXPECT_TRUE(tensor.gaps_intact()) << "written between the elements of " << tensor.name();
}

#if defined(__x86_64__)
__attribute__((target("avx"))) void zero_upper_halves() { __builtin_ia32_vzeroupper(); }
#endif

// Compiled with -O1, as under sanitizers, kernels leave the upper halves of vector registers in use. SSE instructions, which draw
// the data of the next case, then take several times as long.
void free_upper_halves() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx")) zero_upper_halves();
#endif
}

}  // namespace

Execution sequential_execution(int workers) {
  Execution execution;
  execution.workers = workers;
  return execution;
}

Execution threaded_execution(int workers) {
  Execution execution = sequential_execution(workers);
  execution.parallel_for = [](void*, int count, void (*body)(void*, int), void* argument) {
    std::vector<std::thread> threads;
    for (int worker = count - 1; worker >= 0; --worker)
      threads.emplace_back(body, argument, worker);
    for (std::thread& thread : threads) thread.join();
  };
  return execution;
}

Execution pooled_execution() {
  static ThreadPool pool(2);
  return pool.execution();
}

Workspace::Workspace(std::size_t bytes, const Execution& execution)
    : memory_(bytes, "workspace"), execution_(execution) {
  execution_.workspace = memory_.data();
  execution_.workspace_bytes = memory_.size();
}

OwnedTileLists make_tile_lists(const TileListArgs& args, const Execution& execution) {
  const auto bytes = [](std::int64_t count, std::size_t size) {
    return static_cast<std::size_t>(count) * size;
  };
  constexpr Device cpu = Device::cpu;
  const std::int64_t lists = args.lists();
  const Workspace workspace(tile_lists_workspace_size(cpu, args, execution), execution);
  OwnedTileLists owned{
      .lists = {},
      .begin = GuardedBuffer(bytes(lists, sizeof(std::int64_t)), "begin"),
      .count = GuardedBuffer(bytes(lists, sizeof(std::int32_t)), "count"),
      .full = GuardedBuffer(bytes(lists, sizeof(std::int32_t)), "full"),
      .keys = GuardedBuffer(bytes(tile_list_entries(cpu, args, workspace), sizeof(std::int32_t)),
                            "keys")};
  const TileListBuffers buffers{.begin = reinterpret_cast<std::int64_t*>(owned.begin.data()),
                                .count = reinterpret_cast<std::int32_t*>(owned.count.data()),
                                .full = reinterpret_cast<std::int32_t*>(owned.full.data()),
                                .keys = reinterpret_cast<std::int32_t*>(owned.keys.data())};
  owned.lists = build_tile_lists(cpu, args, buffers, workspace);
  return owned;
}

RowValues row_values(Tensor& tensor) {
  if (tensor.element() == Element::f64) return tensor.data<double>();
  return tensor.data<float>();
}

Results::Results(const Data& data) {
  const Problem& p = data.problem;
  const Layout layout = data.layout == Layout::expanded ? Layout::contiguous : data.layout;
  const Element element = element_of(p.dtype);
  const Element lse_element = p.dtype == DType::f64 ? Element::f64 : Element::f32;
  const Shape lse_shape = {p.batch, p.heads_q, p.seqlen_q, 1};
  out = Tensor("out", element, data.dout.shape(), layout);
  lse = Tensor("lse", lse_element, lse_shape);
  lse_low = Tensor("lse_low", lse_element, lse_shape);
  dq = Tensor("dq", element, data.q.shape(), layout);
  dk = Tensor("dk", element, data.k.shape(), layout);
  dv = Tensor("dv", element, data.v.shape(), layout);
  dbias = Tensor("dbias", element_of(p.bias_dtype), p.bias_shape, layout, true);
}

ForwardArgs forward_args(const Data& data, Results& results) {
  return {.problem = data.problem,
          .in = data.inputs(),
          .out = results.out.view(),
          .lse = row_values(results.lse),
          .lse_low = row_values(results.lse_low)};
}

BackwardArgs backward_args(const Data& data, Results& results, const Wanted& wanted) {
  const auto gradient = [](bool is_wanted, Tensor& tensor) {
    return is_wanted ? tensor.view() : Tensor4{};
  };
  return {.problem = data.problem,
          .in = data.inputs(),
          .out = results.out.const_view(),
          .lse = row_values(results.lse),
          .lse_low = row_values(results.lse_low),
          .dout = data.dout.const_view(),
          .dlse = data.dlse_values(),
          .dq = gradient(wanted.dq, results.dq),
          .dk = gradient(wanted.dk, results.dk),
          .dv = gradient(wanted.dv, results.dv),
          .dbias = gradient(wanted.dbias && data.has_bias(), results.dbias)};
}

void run_forward(const Data& data, const RunOptions& options, Results& results) {
  ForwardArgs args = forward_args(data, results);
  if (!options.lse_low) args.lse_low = nullptr;
  run_in_new_workspace(ForwardCall(args, options.execution, options.backend),
                       options.workspace_fill);
  free_upper_halves();
  expect_gaps_intact(results.out);
}

void run_backward(const Data& data, const RunOptions& options, Results& results) {
  BackwardArgs args = backward_args(data, results, options.wanted);
  if (!options.lse_low) args.lse_low = nullptr;
  run_in_new_workspace(BackwardCall(args, options.execution, options.backend),
                       options.workspace_fill);
  free_upper_halves();
  for (const Tensor* tensor : {&results.dq, &results.dk, &results.dv, &results.dbias}) {
    expect_gaps_intact(*tensor);
  }
}

Results run(const Data& data, const RunOptions& options) {
  Results results(data);
  run_forward(data, options, results);
  run_backward(data, options, results);
  return results;
}

}  // namespace flash_dmattn::testing
