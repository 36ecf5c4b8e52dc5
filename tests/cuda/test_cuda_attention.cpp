#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "backend.h"
#include "device.h"
#include "support/cases.h"
#include "support/compare.h"
#include "support/yardstick.h"

// The backend "cuda" against the reference, over the same case table as the CPU's.
namespace flash_dmattn {
namespace {

using testing::Case;
using testing::Data;
using testing::DeviceBuffer;
using testing::DeviceTensor;
using testing::Results;
using testing::Yardstick;

struct DevicePlan {
  testing::OwnedPlan host;
  DeviceBuffer begin, count, full, keys;

  explicit DevicePlan(testing::OwnedPlan owned)
      : host(std::move(owned)),
        begin(host.begin.size()),
        count(host.count.size()),
        full(host.full.size()),
        keys(host.keys.size()) {
    begin.upload(host.begin.data());
    count.upload(host.count.data());
    full.upload(host.full.data());
    keys.upload(host.keys.data());
  }

  Plan view() const {
    Plan plan = host.plan;
    if (plan.tiles == 0) return plan;
    plan.begin = reinterpret_cast<std::int64_t*>(begin.data());
    plan.count = reinterpret_cast<std::int32_t*>(count.data());
    plan.full = reinterpret_cast<std::int32_t*>(full.data());
    plan.keys = reinterpret_cast<std::int32_t*>(keys.data());
    return plan;
  }
};

Problem on_device(Problem problem) {
  problem.device = Device::cuda;
  return problem;
}

testing::OwnedPlan plan_of(const Data& data, bool wanted) {
  if (!data.has_intervals() || !wanted) return {};
  PlanArgs args;
  args.batch = data.problem.intervals_shape[0];
  args.heads = data.problem.intervals_shape[1];
  args.seqlen_q = data.problem.seqlen_q;
  args.seqlen_k = data.problem.seqlen_k;
  args.tile_rows = query_tile_rows(on_device(data.problem), "cuda");
  args.causal = data.problem.causal;
  args.intervals = data.intervals_view();
  return testing::make_plan(args, testing::in_turn(1));
}

// Forward and backward on the device.
Results run(Data& data, bool with_plan = true) {
  Results results(data);
  DeviceTensor q(data.q), k(data.k), v(data.v), mask(data.mask), bias(data.bias), dout(data.dout);
  DeviceTensor out(results.out), lse(results.lse), lse_low(results.lse_low);
  DeviceTensor dq(results.dq), dk(results.dk), dv(results.dv), dbias(results.dbias);
  DeviceBuffer intervals(data.intervals.size() * sizeof(KeyInterval));
  intervals.upload(data.intervals.data());
  const DevicePlan plan(plan_of(data, with_plan));

  Inputs in;
  in.q = q.view();
  in.k = k.view();
  in.v = v.view();
  if (data.has_mask()) in.mask = mask.view();
  if (data.has_bias()) in.bias = bias.view();
  if (data.has_intervals()) {
    in.intervals = data.intervals_view();
    in.intervals.data = reinterpret_cast<const KeyInterval*>(intervals.data());
  }
  in.plan = plan.view();

  ForwardArgs forward{.problem = on_device(data.problem),
                      .in = in,
                      .out = out.view(),
                      .lse = lse.data<float>(),
                      .lse_low = lse_low.data<float>()};
  Execution execution;
  execution.workspace_bytes = forward_workspace_size(forward, execution);
  const DeviceBuffer forward_workspace(execution.workspace_bytes);
  execution.workspace = forward_workspace.data();
  flash_dmattn::forward(forward, execution);
  testing::check_cuda(cudaDeviceSynchronize());

  BackwardArgs backward{.problem = on_device(data.problem),
                        .in = in,
                        .out = out.view(),
                        .lse = lse.data<float>(),
                        .lse_low = lse_low.data<float>(),
                        .dout = dout.view(),
                        .dq = dq.view(),
                        .dk = dk.view(),
                        .dv = dv.view(),
                        .dbias = {}};
  if (data.has_bias()) backward.dbias = dbias.view();
  execution.workspace_bytes = backward_workspace_size(backward, execution);
  const DeviceBuffer backward_workspace(execution.workspace_bytes);
  execution.workspace = backward_workspace.data();
  flash_dmattn::backward(backward, execution);
  testing::check_cuda(cudaDeviceSynchronize());

  for (DeviceTensor* tensor : {&out, &lse, &lse_low, &dq, &dk, &dv, &dbias}) tensor->download();
  for (const testing::Tensor* tensor :
       {&results.out, &results.dq, &results.dk, &results.dv, &results.dbias}) {
    EXPECT_TRUE(tensor->gaps_intact()) << "written between the elements of " << tensor->name();
  }
  return results;
}

std::vector<Case> supported_cases() {
  std::vector<Case> cases;
  for (const Case& c : testing::attention_cases()) {
    const bool sixteen_bits = c.problem.dtype == DType::bf16 || c.problem.dtype == DType::f16;
    if (sixteen_bits && c.problem.head_dim % 8 == 0) cases.push_back(c);
  }
  return cases;
}

class CudaTable : public ::testing::TestWithParam<Case> {};

TEST_P(CudaTable, IsWithinItsBounds) {
  const Case& c = GetParam();
  if (c.slow && std::getenv("FLASH_DMATTN_QUICK_TESTS") != nullptr) {
    GTEST_SKIP() << "slow, and FLASH_DMATTN_QUICK_TESTS is set";
  }
  const BackendInfo info = cuda_backend.info();
  if (!info.available) GTEST_SKIP() << info.reason;
  ASSERT_EQ(supports(on_device(c.problem), "cuda"), "");
  Data data(c);
  const Results expected = testing::oracle(data);
  const Yardstick yardstick(data);
  {
    SCOPED_TRACE("with the plan");
    testing::expect_close(data, run(data), expected, yardstick);
  }
  if (data.has_intervals()) {
    SCOPED_TRACE("without a plan");
    testing::expect_close(data, run(data, false), expected, yardstick);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaTable, ::testing::ValuesIn(supported_cases()),
                         [](const auto& test) { return test.param.name; });

// ---- Situations that have produced non-finite gradients elsewhere ------------------------------------

void expect_finite_gradients(const testing::CaseWords& words) {
  const BackendInfo info = cuda_backend.info();
  if (!info.available) GTEST_SKIP() << info.reason;
  for (int seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    testing::CaseWords seeded = words;
    seeded["seed"] = std::to_string(seed);
    Data data(testing::case_from(seeded));
    const Results results = run(data);
    for (const testing::Tensor* tensor : {&results.out, &results.dq, &results.dk, &results.dv}) {
      ASSERT_TRUE(testing::all_finite(*tensor)) << tensor->name();
    }
  }
}

TEST(CudaGradients, AreFiniteAt256x256) {
  expect_finite_gradients({{"name", "dv"},
                           {"dtype", "bf16"},
                           {"heads_q", "1"},
                           {"seqlen_q", "256"},
                           {"seqlen_k", "256"},
                           {"causal", "1"}});
}

TEST(CudaGradients, AreFiniteAtKeyLength192AndHeadDim80) {
  expect_finite_gradients({{"name", "tails"},
                           {"dtype", "bf16"},
                           {"seqlen_q", "192"},
                           {"seqlen_k", "192"},
                           {"head_dim", "80"},
                           {"causal", "1"}});
}

}  // namespace
}  // namespace flash_dmattn
