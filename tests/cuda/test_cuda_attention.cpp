#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "backend.h"
#include "device_case.h"
#include "support/cases.h"
#include "support/compare.h"

// The backend "cuda" against the reference, over the same case table as the CPU's.
namespace flash_dmattn::testing {
namespace {

Results run(Data& data, Walk walk = Walk::schedule) { return DeviceCase(data, walk).run(); }

std::vector<Case> supported_cases() {
  std::vector<Case> cases;
  for (const Case& c : attention_cases()) {
    const bool sixteen_bits = c.problem.dtype == DType::bf16 || c.problem.dtype == DType::f16;
    if (sixteen_bits && c.problem.head_dim % 8 == 0) cases.push_back(c);
  }
  return cases;
}

class CudaTable : public OnDevice, public ::testing::WithParamInterface<Case> {};

TEST_P(CudaTable, ResultsAreWithinBounds) {
  const Case& c = GetParam();
  if (c.slow && is_quick_run()) GTEST_SKIP() << "slow, and FLASH_DMATTN_QUICK_TESTS is set";
  ASSERT_EQ(supports(on_device(c.problem), "cuda"), "");
  Data data(c);
  const Bounds bounds(data);
  // Scores beyond fp32 have no order on a GPU.
  const bool exceeds_fp32 = c.inputs == "limits" && c.problem.dtype == DType::bf16;
  const auto expect = [&](const Results& results) {
    exceeds_fp32 ? expect_finite(results) : bounds.expect(results);
  };
  {
    SCOPED_TRACE("with the schedule");
    expect(run(data));
  }
  if (data.has_intervals()) {
    SCOPED_TRACE("without a schedule");
    expect(run(data, Walk::intervals));
  }
  data.problem.deterministic = true;
  for (const Walk walk : {Walk::schedule, Walk::intervals}) {
    SCOPED_TRACE("deterministic, walk " + std::to_string(static_cast<int>(walk)));
    const Results first = run(data, walk);
    expect(first);
    expect_same_bits(first, run(data, walk));
    if (!data.has_intervals()) break;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaTable, ::testing::ValuesIn(supported_cases()),
                         [](const auto& test) { return test.param.name; });

// ---- Kernels ----------------------------------------------------------------------------------------------

class CudaKernels : public OnDevice {};

// ResultsAreWithinBounds runs these combinations of every case.
TEST_F(CudaKernels, CasesRunEveryKernel) {
  std::set<std::string> run;
  for (const Case& c : supported_cases()) {
    Data data(c);
    for (const bool deterministic : {false, true}) {
      data.problem.deterministic = deterministic;
      for (const Walk walk : {Walk::schedule, Walk::intervals}) {
        const DeviceCase device_case(data, walk);
        run.insert(device_case.forward_kernel());
        run.insert(device_case.backward_kernel());
        if (!data.has_intervals()) break;
      }
    }
  }
  // Kernels of an older family run where the newest declines; with each family as the newest one (ctest's variants)
  // all of its own have to.
  const std::vector<std::string> kernels = kernel_names("cuda");
  const auto family_of = [](const std::string& kernel) {
    return kernel.substr(0, kernel.find(' '));
  };
  for (const std::string& kernel : kernels) {
    if (kernel.find(" decode_step ") != std::string::npos) continue;  // of KV caches
    const bool newest = family_of(kernel) == family_of(kernels.front());
    EXPECT_TRUE(run.contains(kernel) || !newest) << "no case runs " << kernel;
    run.erase(kernel);
  }
  EXPECT_EQ(run, std::set<std::string>()) << "kernels that kernel_names does not list";
}

// ---- Situations that have produced non-finite gradients elsewhere ------------------------------------

class CudaGradients : public OnDevice {};

TEST_F(CudaGradients, ManySeedsGiveFiniteGradients) {
  struct Size {
    const char* seqlen;
    const char* head_dim;
  };
  for (const Size& size : {Size{"256", "64"}, Size{"256", "128"}, Size{"192", "80"}}) {
    for (int seed = 0; seed < 200; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Data data(case_from({{"name", "seeds"},
                           {"dtype", "bf16"},
                           {"seqlen_q", size.seqlen},
                           {"seqlen_k", size.seqlen},
                           {"head_dim", size.head_dim},
                           {"causal", "1"},
                           {"seed", std::to_string(seed)}}));
      ASSERT_NO_FATAL_FAILURE(expect_finite(run(data)));
    }
  }
}

// ---- Deterministic gradients, where many blocks add to the same elements ------------------------------

struct DeterminismCase {
  const char* name;
  CaseWords words;
};

class CudaDeterminism : public OnDevice, public ::testing::WithParamInterface<DeterminismCase> {};

TEST_P(CudaDeterminism, TwentyRunsGiveSameBits) {
  CaseWords words = GetParam().words;
  words.merge(CaseWords{{"name", GetParam().name},
                        {"dtype", "bf16"},
                        {"batch", "2"},
                        {"heads_q", "8"},
                        {"heads_kv", "4"},
                        {"seqlen_q", "1500"},
                        {"seqlen_k", "1500"},
                        {"mask_fill", "blocks"},
                        {"bias_fill", "normal"},
                        {"causal", "1"}});
  Data data(case_from(words));
  data.problem.deterministic = true;
  for (const Walk walk : {Walk::schedule, Walk::intervals}) {
    const Results first = run(data, walk);
    for (int repeat = 1; repeat < 20; ++repeat) expect_same_bits(first, run(data, walk));
    if (!data.has_intervals()) break;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Situations, CudaDeterminism,
    ::testing::Values(DeterminismCase{"plain", {}}, DeterminismCase{"full", {{"causal", "0"}}},
                      DeterminismCase{"head_dim_128", {{"head_dim", "128"}}},
                      DeterminismCase{"head_dim_256", {{"head_dim", "256"}}},
                      DeterminismCase{"values_of_128", {{"head_dim", "192"}, {"value_dim", "128"}}},
                      DeterminismCase{"values_of_128_of_a_selection",
                                      {{"head_dim", "192"},
                                       {"value_dim", "128"},
                                       {"bias", "bv1k"},
                                       {"intervals", "per_query"},
                                       {"intervals_shape", "bv"},
                                       {"window", "300"}}},
                      DeterminismCase{"softcap", {{"softcap", "20"}}},
                      DeterminismCase{"bias_of_all", {{"bias", "111k"}}},
                      DeterminismCase{"bias_of_heads", {{"bias", "1h11"}, {"softcap", "20"}}},
                      DeterminismCase{"bias_of_queries", {{"bias", "11q1"}}},
                      DeterminismCase{"bias_of_elements", {{"bias", "11qk"}}},
                      DeterminismCase{"bias_of_elements_and_heads",
                                      {{"bias", "1vqk"}, {"head_dim", "128"}}},
                      DeterminismCase{"mask_of_elements", {{"mask", "b1qk"}}},
                      DeterminismCase{"selection",
                                      {{"bias", "bv1k"},
                                       {"intervals", "per_query"},
                                       {"intervals_shape", "bv"},
                                       {"window", "300"}}},
                      DeterminismCase{"delayed_bias", {{"bias", "bv1k"}, {"bias_delay", "200"}}},
                      DeterminismCase{"delayed_bias_of_a_selection",
                                      {{"bias", "bv1k"},
                                       {"bias_delay", "200"},
                                       {"head_dim", "128"},
                                       {"intervals", "per_query"},
                                       {"intervals_shape", "bv"},
                                       {"window", "300"}}},
                      DeterminismCase{"sliding",
                                      {{"bias", "bvqk"},
                                       {"intervals", "sliding"},
                                       {"intervals_shape", "11"},
                                       {"window", "200"}}}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace flash_dmattn::testing
