#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "backend.h"
#include "cuda/family.h"
#include "device_case.h"
#include "support/cases.h"
#include "support/compare.h"
#include "support/run.h"

// Every family of kernels computes the same as the CPU, at sizes at which the reference takes too long; where it
// declines a direction, from and with what another leaves.
namespace flash_dmattn::testing {
namespace {

struct FamilyCase {
  const char* name;
  CaseWords words;
};

class CudaFamilies : public OnDevice, public ::testing::WithParamInterface<FamilyCase> {};

// Their distance as vectors. P and dS are rounded to 16 bits by each, the results once more: 2^-9 at most a time.
void expect_agreement(const Tensor& actual, const Tensor& expected) {
  EXPECT_TRUE(same_nonfinite(actual, expected));
  double difference = 0;
  double size = 0;
  expected.for_each([&](const Index& i, double value) {
    if (!std::isfinite(value)) return;
    difference += std::pow(actual.get(i) - value, 2);
    size += value * value;
  });
  EXPECT_LE(std::sqrt(difference), 0x1p-7 * std::sqrt(size)) << actual.name();
}

TEST_P(CudaFamilies, EachCaseMatchesCpu) {
  CaseWords words = GetParam().words;
  words.merge(CaseWords{{"name", GetParam().name},
                        {"dtype", "bf16"},
                        {"heads_q", "4"},
                        {"heads_kv", "2"},
                        {"seqlen_q", "2100"},
                        {"seqlen_k", "2100"},
                        {"head_dim", "128"},
                        {"causal", "1"}});
  Data data(case_from(words));
  const Results cpu = run(data, {.backend = "cpu", .execution = pooled_execution()});

  const cuda::DeviceProperties& device = cuda::current_device();
  for (const cuda::Family* const family : cuda::families()) {
    if (!family->decline_device(device).empty()) continue;
    SCOPED_TRACE(std::string(family->name));
    const Results results = DeviceCase(data, Walk::schedule).run_by(*family);
    expect_agreement(results.out, cpu.out);
    expect_agreement(results.lse, cpu.lse);
    expect_agreement(results.dq, cpu.dq);
    expect_agreement(results.dk, cpu.dk);
    expect_agreement(results.dv, cpu.dv);
    if (data.has_bias()) expect_agreement(results.dbias, cpu.dbias);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Situations, CudaFamilies,
    ::testing::Values(FamilyCase{"plain", {}}, FamilyCase{"full", {{"causal", "0"}}},
                      FamilyCase{"head_dim_64", {{"head_dim", "64"}}},
                      FamilyCase{"f16", {{"dtype", "f16"}}},
                      FamilyCase{"more_keys", {{"seqlen_q", "1300"}}},
                      FamilyCase{"no_keys", {{"seqlen_k", "0"}, {"causal", "0"}}},
                      FamilyCase{"softcap", {{"softcap", "20"}}},
                      FamilyCase{"key_bias", {{"bias", "bh1k"}, {"bias_fill", "normal"}}},
                      FamilyCase{
                          "sliding",
                          {{"intervals", "sliding"}, {"intervals_shape", "11"}, {"window", "300"}}},
                      FamilyCase{"selection",
                                 {{"bias", "bv1k"},
                                  {"bias_fill", "normal"},
                                  {"intervals", "per_query"},
                                  {"intervals_shape", "bv"},
                                  {"window", "500"}}},
                      FamilyCase{"dense_mask_and_bias",
                                 {{"mask", "b1qk"},
                                  {"mask_fill", "random"},
                                  {"bias", "bvqk"},
                                  {"bias_fill", "normal"}}}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace flash_dmattn::testing
