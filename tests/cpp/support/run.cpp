#include "support/run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace flash_dmattn::testing {
namespace {

// The plan that `data` needs of `backend`, without buffers when there are no intervals.
OwnedPlan plan_of(const Data& data, std::string_view backend) {
  if (!data.has_intervals()) return {};
  PlanArgs args;
  args.batch = data.problem.intervals_shape[0];
  args.heads = data.problem.intervals_shape[1];
  args.seqlen_q = data.problem.seqlen_q;
  args.seqlen_k = data.problem.seqlen_k;
  args.tile_rows = query_tile_rows(data.problem, backend);
  args.causal = data.problem.causal;
  args.intervals = data.intervals_view();
  return make_plan(args, in_turn(1));
}

void give(GuardedBuffer& workspace, std::byte fill, Execution& execution) {
  std::fill_n(workspace.data(), workspace.size(), fill);
  execution.workspace = workspace.data();
  execution.workspace_bytes = workspace.size();
}

void expect_gaps_intact(const Tensor& tensor) {
  EXPECT_TRUE(tensor.gaps_intact()) << "written between the elements of " << tensor.name();
}

}  // namespace

Execution in_turn(int workers) {
  Execution execution;
  execution.workers = workers;
  return execution;
}

Execution on_threads(int workers) {
  Execution execution = in_turn(workers);
  execution.parallel_for = [](void*, int count, void (*body)(void*, int), void* argument) {
    std::vector<std::thread> threads;
    for (int worker = count - 1; worker >= 0; --worker)
      threads.emplace_back(body, argument, worker);
    for (std::thread& thread : threads) thread.join();
  };
  return execution;
}

Execution on_pool() {
  static ThreadPool pool(2);
  return pool.execution();
}

OwnedPlan make_plan(PlanArgs args, Execution execution) {
  const auto bytes = [](std::int64_t count, std::size_t size) {
    return static_cast<std::size_t>(count) * size;
  };
  const std::int64_t tiles = (args.seqlen_q + args.tile_rows - 1) / args.tile_rows;
  const std::int64_t lists = args.batch * args.heads * tiles;
  GuardedBuffer workspace(plan_workspace_size(args, execution), "plan workspace");
  execution.workspace = workspace.data();
  execution.workspace_bytes = workspace.size();
  OwnedPlan owned{.plan = {},
                  .begin = GuardedBuffer(bytes(lists, sizeof(std::int64_t)), "plan.begin"),
                  .count = GuardedBuffer(bytes(lists, sizeof(std::int32_t)), "plan.count"),
                  .full = GuardedBuffer(bytes(lists, sizeof(std::int32_t)), "plan.full"),
                  .keys = GuardedBuffer(bytes(plan_entries(args, execution), sizeof(std::int32_t)),
                                        "plan.keys")};
  const PlanBuffers buffers{.begin = reinterpret_cast<std::int64_t*>(owned.begin.data()),
                            .count = reinterpret_cast<std::int32_t*>(owned.count.data()),
                            .full = reinterpret_cast<std::int32_t*>(owned.full.data()),
                            .keys = reinterpret_cast<std::int32_t*>(owned.keys.data())};
  owned.plan = build_plan(args, buffers, execution);
  return owned;
}

Results::Results(const Data& data) {
  const Problem& p = data.problem;
  const Layout layout = data.layout == Layout::expanded ? Layout::contiguous : data.layout;
  const Element element = element_of(p.dtype);
  const Element lse_element = p.dtype == DType::f64 ? Element::f64 : Element::f32;
  const Shape lse_shape = {p.batch, p.heads_q, p.seqlen_q, 1};
  out = Tensor("out", element, data.q.shape(), layout);
  lse = Tensor("lse", lse_element, lse_shape);
  lse_low = Tensor("lse_low", lse_element, lse_shape);
  dq = Tensor("dq", element, data.q.shape(), layout);
  dk = Tensor("dk", element, data.k.shape(), layout);
  dv = Tensor("dv", element, data.v.shape(), layout);
  dbias = Tensor("dbias", element_of(p.bias_dtype), p.bias_shape, layout, true);
}

void run_forward(const Data& data, const RunOptions& options, Results& results) {
  const OwnedPlan plan = plan_of(data, options.backend);
  ForwardArgs args;
  args.problem = data.problem;
  args.in = data.inputs();
  args.in.plan = plan.plan;
  args.out = results.out.view();
  args.lse = results.lse.data<float>();
  if (options.lse_low) args.lse_low = results.lse_low.data<float>();

  Execution execution = options.execution;
  GuardedBuffer workspace(forward_workspace_size(args, execution, options.backend),
                          "forward workspace");
  give(workspace, options.workspace_fill, execution);
  forward(args, execution, options.backend);
  expect_gaps_intact(results.out);
}

void run_backward(const Data& data, const RunOptions& options, Results& results) {
  const OwnedPlan plan = plan_of(data, options.backend);
  BackwardArgs args;
  args.problem = data.problem;
  args.in = data.inputs();
  args.in.plan = plan.plan;
  args.out = results.out.const_view();
  args.lse = results.lse.data<float>();
  if (options.lse_low) args.lse_low = results.lse_low.data<float>();
  args.dout = data.dout.const_view();
  if (options.wanted.dq) args.dq = results.dq.view();
  if (options.wanted.dk) args.dk = results.dk.view();
  if (options.wanted.dv) args.dv = results.dv.view();
  if (options.wanted.dbias && data.has_bias()) args.dbias = results.dbias.view();

  Execution execution = options.execution;
  GuardedBuffer workspace(backward_workspace_size(args, execution, options.backend),
                          "backward workspace");
  give(workspace, options.workspace_fill, execution);
  backward(args, execution, options.backend);
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
