#include "support/run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace flash_dmattn::testing {
namespace {

void give(GuardedBuffer& workspace, std::byte fill, Execution& execution) {
  std::fill_n(workspace.data(), workspace.size(), fill);
  execution.workspace = workspace.data();
  execution.workspace_bytes = workspace.size();
}

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

OwnedTileLists make_tile_lists(const TileListArgs& args, Execution execution) {
  const auto bytes = [](std::int64_t count, std::size_t size) {
    return static_cast<std::size_t>(count) * size;
  };
  constexpr Device cpu = Device::cpu;
  const std::int64_t lists = args.lists();
  GuardedBuffer workspace(tile_lists_workspace_size(cpu, args, execution), "tile list workspace");
  execution.workspace = workspace.data();
  execution.workspace_bytes = workspace.size();
  OwnedTileLists owned{
      .lists = {},
      .begin = GuardedBuffer(bytes(lists, sizeof(std::int64_t)), "begin"),
      .count = GuardedBuffer(bytes(lists, sizeof(std::int32_t)), "count"),
      .full = GuardedBuffer(bytes(lists, sizeof(std::int32_t)), "full"),
      .keys = GuardedBuffer(bytes(tile_list_entries(cpu, args, execution), sizeof(std::int32_t)),
                            "keys")};
  const TileListBuffers buffers{.begin = reinterpret_cast<std::int64_t*>(owned.begin.data()),
                                .count = reinterpret_cast<std::int32_t*>(owned.count.data()),
                                .full = reinterpret_cast<std::int32_t*>(owned.full.data()),
                                .keys = reinterpret_cast<std::int32_t*>(owned.keys.data())};
  owned.lists = build_tile_lists(cpu, args, buffers, execution);
  return owned;
}

OwnedSchedule make_schedule(const Data& data, Direction direction, std::string_view backend) {
  const Problem& p = data.problem;
  const Visibility visibility = data.inputs().visibility;
  Execution execution = in_turn(1);
  if (!data.has_intervals()) return {};
  GuardedBuffer workspace(schedule_workspace_size(p, visibility, direction, execution, backend),
                          "schedule workspace");
  execution.workspace = workspace.data();
  execution.workspace_bytes = workspace.size();
  OwnedSchedule owned{.schedule = {},
                      .memory = GuardedBuffer(
                          schedule_size(p, visibility, direction, execution, backend), "schedule")};
  owned.schedule = build_schedule(p, visibility, direction,
                                  {owned.memory.data(), owned.memory.size()}, execution, backend);
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

void run_forward(const Data& data, const RunOptions& options, Results& results) {
  const OwnedSchedule owned = make_schedule(data, Direction::forward, options.backend);
  ForwardArgs args;
  args.problem = data.problem;
  args.in = data.inputs();
  args.schedule = owned.schedule;
  args.out = results.out.view();
  args.lse = row_values(results.lse);
  if (options.lse_low) args.lse_low = row_values(results.lse_low);

  Execution execution = options.execution;
  GuardedBuffer workspace(forward_workspace_size(args, execution, options.backend),
                          "forward workspace");
  give(workspace, options.workspace_fill, execution);
  forward(args, execution, options.backend);
  free_upper_halves();
  expect_gaps_intact(results.out);
}

void run_backward(const Data& data, const RunOptions& options, Results& results) {
  const OwnedSchedule owned = make_schedule(data, Direction::backward, options.backend);
  BackwardArgs args;
  args.problem = data.problem;
  args.in = data.inputs();
  args.schedule = owned.schedule;
  args.out = results.out.const_view();
  args.lse = row_values(results.lse);
  if (options.lse_low) args.lse_low = row_values(results.lse_low);
  args.dout = data.dout.const_view();
  args.dlse = data.dlse_values();
  if (options.wanted.dq) args.dq = results.dq.view();
  if (options.wanted.dk) args.dk = results.dk.view();
  if (options.wanted.dv) args.dv = results.dv.view();
  if (options.wanted.dbias && data.has_bias()) args.dbias = results.dbias.view();

  Execution execution = options.execution;
  GuardedBuffer workspace(backward_workspace_size(args, execution, options.backend),
                          "backward workspace");
  give(workspace, options.workspace_fill, execution);
  backward(args, execution, options.backend);
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
