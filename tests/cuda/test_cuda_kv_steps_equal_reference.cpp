#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <span>
#include <string>

#include "backend.h"
#include "kv_caches.h"

// Decode steps on the device equal those of the reference, one by one and as a graph that is replayed.
namespace flash_dmattn::testing {
namespace {

// Rows of the batch before `first_row` are not compared; `batch` is the dimension of rows.
void expect_close(const Tensor& got, const Tensor& expected, double tolerance, std::size_t batch,
                  std::int64_t first_row) {
  expected.for_each([&](const Index& i, double value) {
    if (i[batch] < first_row) return;
    const double actual = got.get(i);
    const double error = std::abs(actual - value);
    ASSERT_TRUE(actual == value || error <= tolerance * std::max(1.0, std::abs(value)))
        << got.name() << ": expected " << value << ", actual " << actual;
  });
}

// Inserts one token of every row and compares what its query sees, in the rows from `first_row` on.
void step(const KvSizes& sizes, Caches& caches, Random& random, ScoreUse use, double softcap,
          std::int64_t first_row = 0) {
  Tokens tokens(sizes, 1, random);
  const KvCacheShape& s = sizes.shape;
  const std::int64_t heads_q = s.heads_kv * sizes.group;
  const auto element = element_of(s.dtype);
  Tensor out("out", element, {s.batch, 1, heads_q, value_dim_of(s)});
  Tensor lse("lse", Element::f32, {1, s.batch, heads_q, 1});
  Tensor got_out("out", element, {s.batch, 1, heads_q, value_dim_of(s)});
  Tensor got_lse("lse", Element::f32, {1, s.batch, heads_q, 1});
  DeviceTensor device_out(got_out);
  DeviceTensor device_lse(got_lse);

  DecodeStepArgs args{.cache = caches.host,
                      .heads_q = heads_q,
                      .scale = default_scale(s.head_dim),
                      .softcap = softcap,
                      .score_use = use,
                      .q = tokens.q.const_view(),
                      .out = out.view(),
                      .lse = lse.data<float>()};
  tokens.give_host(args);
  run_in_new_workspace(DecodeStepCall(args, {}, "reference"));

  args.cache = caches.device;
  args.q = tokens.device_q.view();
  args.out = device_out.view();
  args.lse = device_lse.data<float>();
  tokens.give_device(args);
  run_on_device(DecodeStepCall(args, {}, "cuda"));
  device_out.download();
  device_lse.download();
  expect_close(got_lse, lse, 1e-4, 1, first_row);
  expect_close(got_out, out, s.dtype == DType::bf16 ? 0.02 : 0.004, 0, first_row);
}

class CudaKvSteps : public KvCachesOfDevice {};

TEST_P(CudaKvSteps, StepsMatchReference) {
  const KvSizes& sizes = GetParam();
  Random random(1);
  Caches caches(sizes.shape);
  if (sizes.prompt > 0) fill_both(sizes, caches, random, false);
  for (int i = 0; i < 16; ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    step(sizes, caches, random, i % 7 == 3 ? ScoreUse::choose : ScoreUse::choose_and_bias,
         i % 5 == 2 ? 1.5f : 0);
    caches.expect_same();
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaKvSteps, CountsOutOfRangeChangeNoOtherRow) {
  const KvSizes& sizes = GetParam();
  Random random(2);
  Caches caches(sizes.shape);
  if (sizes.prompt > 0) fill_both(sizes, caches, random, false);
  for (const std::int32_t number : numbers_out_of_range) {
    SCOPED_TRACE(number);
    caches.spoil_counts(number);
    for (int i = 0; i < 2; ++i) {
      step(sizes, caches, random, ScoreUse::choose_and_bias, 0, 1);
      caches.expect_same(1);
      if (HasFatalFailure()) return;
    }
  }
}

// The same steps one by one, and as a graph that is replayed.
TEST_P(CudaKvSteps, CapturedStepsEqualSteps) {
  const KvSizes& sizes = GetParam();
  const KvCacheShape& s = sizes.shape;
  Random random(4);
  Caches eager(s);
  if (sizes.prompt > 0) fill_both(sizes, eager, random, false);
  Random again(4);
  Caches captured(s);
  if (sizes.prompt > 0) fill_both(sizes, captured, again, false);

  Tokens tokens(sizes, 1, random, true);
  const std::int64_t heads_q = s.heads_kv * sizes.group;
  Tensor out("out", element_of(s.dtype), {s.batch, 1, heads_q, value_dim_of(s)});
  Tensor graph_out("out", element_of(s.dtype), {s.batch, 1, heads_q, value_dim_of(s)});
  DeviceTensor device_out(out);
  DeviceTensor device_graph_out(graph_out);
  DeviceBuffer lse(static_cast<std::size_t>(s.batch * heads_q) * 4);
  DecodeStepArgs args{.cache = eager.device,
                      .heads_q = heads_q,
                      .scale = default_scale(s.head_dim),
                      .q = tokens.device_q.view(),
                      .out = device_out.view(),
                      .lse = lse.as<float>()};
  tokens.give_device(args);
  const DecodeStepCall eager_step(args, {}, "cuda");
  const DeviceBuffer workspace(eager_step.workspace_size());
  constexpr int steps = 1000;
  for (int i = 0; i < steps; ++i) eager_step.run(workspace);
  check_cuda(cudaDeviceSynchronize());

  args.cache = captured.device;
  args.out = device_graph_out.view();
  const Graph graph([&](cudaStream_t stream) {
    DecodeStepCall(args, {.stream = stream}, "cuda").run(workspace);
  });
  graph.replay(steps);
  EXPECT_EQ(eager.device_bytes(), captured.device_bytes());
  device_out.download();
  device_graph_out.download();
  EXPECT_TRUE(graph_out.same_bits(out));
}

class CudaKvStepKernels : public OnDevice {};

// The main kernel of the steps of a cache.
std::string kernel_of(const KvSizes& sizes) {
  const DecodeStepArgs args{
      .cache = {.shape = Caches::on_device(sizes.shape)},
      .heads_q = sizes.shape.heads_kv * sizes.group,
      .scale = default_scale(sizes.shape.head_dim),
  };
  std::string reason;
  const auto plan_step = cuda_backend.kv->find_decode_step(args.cache.shape, reason);
  if (plan_step == nullptr) return "";
  Plan<DecodeStepArgs> plan;
  plan_step(args, {}, plan);
  return plan.kernel_name(plan);
}

TEST_F(CudaKvStepKernels, EachKernelIsRunByASize) {
  std::set<std::string> run;
  for (const KvSizes& sizes : kv_sizes()) run.insert(kernel_of(sizes));
  for (const std::string& kernel : kernel_names("cuda")) {
    if (kernel.find(" decode_step ") == std::string::npos) continue;
    EXPECT_EQ(run.erase(kernel), 1U) << "no size runs " << kernel;
  }
  EXPECT_EQ(run, std::set<std::string>()) << "kernels that kernel_names does not list";
}

INSTANTIATE_TEST_SUITE_P(Sizes, CudaKvSteps, ::testing::ValuesIn(kv_sizes()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace flash_dmattn::testing
