#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
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

Problem on_device(Problem problem) {
  problem.device = Device::cuda;
  return problem;
}

// How a run walks its intervals: without a schedule, or by one whose lists have full keys first or go by
// position.
enum class Walk : std::uint8_t { intervals, full_first, by_position };

// The schedule of a direction, on the device.
struct DeviceSchedule {
  std::optional<DeviceBuffer> memory;
  Schedule schedule;

  DeviceSchedule(Problem p, const Visibility& visibility, Direction direction, Walk walk) {
    if (walk == Walk::intervals || visibility.intervals.data == nullptr) return;
    p.deterministic = walk == Walk::by_position && direction == Direction::backward;
    Execution execution;
    execution.workspace_bytes = schedule_workspace_size(p, visibility, direction, execution);
    const DeviceBuffer workspace(execution.workspace_bytes);
    execution.workspace = workspace.data();
    const std::size_t bytes = schedule_size(p, visibility, direction, execution);
    memory.emplace(bytes);
    schedule = build_schedule(p, visibility, direction, {memory->data(), bytes}, execution);
    testing::check_cuda(cudaDeviceSynchronize());
  }
};

// Forward and backward on the device.
Results run(Data& data, Walk walk = Walk::full_first) {
  Results results(data);
  DeviceTensor q(data.q), k(data.k), v(data.v), mask(data.mask), bias(data.bias), dout(data.dout);
  DeviceTensor out(results.out), lse(results.lse), lse_low(results.lse_low);
  DeviceTensor dq(results.dq), dk(results.dk), dv(results.dv), dbias(results.dbias);
  DeviceBuffer intervals(data.intervals.size() * sizeof(KeyInterval));
  intervals.upload(data.intervals.data());

  Inputs in;
  in.q = q.view();
  in.k = k.view();
  in.v = v.view();
  if (data.has_mask()) in.mask = mask.view();
  if (data.has_bias()) in.bias = bias.view();
  if (data.has_intervals()) {
    in.visibility.intervals = data.intervals_view();
    in.visibility.intervals.data = reinterpret_cast<const KeyInterval*>(intervals.data());
    in.visibility.bound = {.base = data.problem.seqlen_k};
  }
  const Problem problem = on_device(data.problem);
  const DeviceSchedule forward_schedule(problem, in.visibility, Direction::forward, walk);
  const DeviceSchedule backward_schedule(problem, in.visibility, Direction::backward, walk);

  ForwardArgs forward{.problem = problem,
                      .in = in,
                      .schedule = forward_schedule.schedule,
                      .out = out.view(),
                      .lse = lse.data<float>(),
                      .lse_low = lse_low.data<float>()};
  Execution execution;
  execution.workspace_bytes = forward_workspace_size(forward, execution);
  const DeviceBuffer forward_workspace(execution.workspace_bytes);
  execution.workspace = forward_workspace.data();
  flash_dmattn::forward(forward, execution);
  testing::check_cuda(cudaDeviceSynchronize());

  BackwardArgs backward{.problem = problem,
                        .in = in,
                        .schedule = backward_schedule.schedule,
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
    SCOPED_TRACE("with the schedule");
    testing::expect_close(data, run(data), expected, yardstick);
  }
  if (data.has_intervals()) {
    SCOPED_TRACE("without a schedule");
    testing::expect_close(data, run(data, Walk::intervals), expected, yardstick);
  }
  data.problem.deterministic = true;
  for (const Walk walk : {Walk::by_position, Walk::full_first, Walk::intervals}) {
    SCOPED_TRACE("deterministic, walk " + std::to_string(static_cast<int>(walk)));
    const Results first = run(data, walk);
    testing::expect_close(data, first, expected, yardstick);
    testing::expect_same_bits(first, run(data, walk));
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
  for (const Walk walk : {Walk::by_position, Walk::full_first, Walk::intervals}) {
    const Results first = run(data, walk);
    for (int repeat = 1; repeat < 20; ++repeat) testing::expect_same_bits(first, run(data, walk));
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
