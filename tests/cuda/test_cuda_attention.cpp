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

// What a run takes beside the data.
enum class PlanKind : std::uint8_t { none, full_first, by_position };

testing::OwnedPlan plan_of(const Data& data, PlanKind kind) {
  if (!data.has_intervals() || kind == PlanKind::none) return {};
  PlanArgs args;
  args.batch = data.problem.intervals_shape[0];
  args.heads = data.problem.intervals_shape[1];
  args.seqlen_q = data.problem.seqlen_q;
  args.seqlen_k = data.problem.seqlen_k;
  args.tile_rows = query_tile_rows(on_device(data.problem), "cuda");
  args.causal = data.problem.causal;
  args.by_position = kind == PlanKind::by_position;
  args.intervals = data.intervals_view();
  return testing::make_plan(args, testing::in_turn(1));
}

// Forward and backward on the device.
Results run(Data& data, PlanKind kind = PlanKind::full_first) {
  Results results(data);
  DeviceTensor q(data.q), k(data.k), v(data.v), mask(data.mask), bias(data.bias), dout(data.dout);
  DeviceTensor out(results.out), lse(results.lse), lse_low(results.lse_low);
  DeviceTensor dq(results.dq), dk(results.dk), dv(results.dv), dbias(results.dbias);
  DeviceBuffer intervals(data.intervals.size() * sizeof(KeyInterval));
  intervals.upload(data.intervals.data());
  const DevicePlan plan(plan_of(data, kind));

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
    testing::expect_close(data, run(data, PlanKind::none), expected, yardstick);
  }
  data.problem.deterministic = true;
  for (const PlanKind kind : {PlanKind::by_position, PlanKind::full_first, PlanKind::none}) {
    SCOPED_TRACE("deterministic, plan " + std::to_string(static_cast<int>(kind)));
    const Results first = run(data, kind);
    testing::expect_close(data, first, expected, yardstick);
    testing::expect_same_bits(first, run(data, kind));
    if (!data.has_intervals()) break;
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

// ---- Deterministic gradients, where many blocks add to the same elements ------------------------------

struct DeterminismCase {
  const char* name;
  testing::CaseWords words;
};

class CudaDeterminism : public ::testing::TestWithParam<DeterminismCase> {};

TEST_P(CudaDeterminism, GivesTheSameBitsInTwentyRuns) {
  const BackendInfo info = cuda_backend.info();
  if (!info.available) GTEST_SKIP() << info.reason;
  testing::CaseWords words = GetParam().words;
  words.merge(testing::CaseWords{{"name", GetParam().name},
                                 {"dtype", "bf16"},
                                 {"batch", "2"},
                                 {"heads_q", "8"},
                                 {"heads_kv", "4"},
                                 {"seqlen_q", "1500"},
                                 {"seqlen_k", "1500"},
                                 {"mask_fill", "blocks"},
                                 {"bias_fill", "normal"},
                                 {"causal", "1"}});
  Data data(testing::case_from(words));
  data.problem.deterministic = true;
  for (const PlanKind kind : {PlanKind::by_position, PlanKind::full_first, PlanKind::none}) {
    const Results first = run(data, kind);
    for (int repeat = 1; repeat < 20; ++repeat) testing::expect_same_bits(first, run(data, kind));
    if (!data.has_intervals()) break;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Situations, CudaDeterminism,
    ::testing::Values(DeterminismCase{"plain", {}}, DeterminismCase{"full", {{"causal", "0"}}},
                      DeterminismCase{"head_dim_128", {{"head_dim", "128"}}},
                      DeterminismCase{"head_dim_256", {{"head_dim", "256"}}},
                      DeterminismCase{"softcap", {{"softcap", "20"}}},
                      DeterminismCase{"bias_of_all", {{"bias", "111k"}}},
                      DeterminismCase{"bias_of_heads", {{"bias", "1h11"}, {"softcap", "20"}}},
                      DeterminismCase{"bias_of_queries", {{"bias", "11q1"}}},
                      DeterminismCase{"bias_of_pairs", {{"bias", "11qk"}}},
                      DeterminismCase{"bias_of_pairs_and_heads",
                                      {{"bias", "1vqk"}, {"head_dim", "128"}}},
                      DeterminismCase{"mask_of_pairs", {{"mask", "b1qk"}}},
                      DeterminismCase{"selection",
                                      {{"bias", "bv1k"},
                                       {"intervals", "per_query"},
                                       {"intervals_shape", "bv"},
                                       {"window", "300"}}},
                      DeterminismCase{"sliding",
                                      {{"bias", "1vqk"},
                                       {"intervals", "sliding"},
                                       {"intervals_shape", "11"},
                                       {"window", "200"}}}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace flash_dmattn
