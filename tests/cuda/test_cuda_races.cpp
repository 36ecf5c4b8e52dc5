#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <string>
#include <vector>

#include "backend.h"
#include "device_case.h"
#include "support/cases.h"

// Looks for races among the producers and consumers of a kernel. A wait or a fence that is missing shows as bits that
// differ between launches, or from those of a kernel whose products overlap with nothing.
namespace flash_dmattn {
namespace {

using testing::CaseWords;
using testing::Data;
using testing::DeviceCase;
using testing::Walk;

struct RaceCase {
  const char* name;
  CaseWords words;
};

const std::vector<RaceCase>& race_cases() {
  static const std::vector<RaceCase> cases = {
      {"plain", {}},
      {"full", {{"causal", "0"}}},
      {"selection",
       {{"bias", "bv1k"},
        {"bias_fill", "normal"},
        {"intervals", "per_query"},
        {"intervals_shape", "bv"},
        {"window", "300"}}},
      {"sliding", {{"intervals", "sliding"}, {"intervals_shape", "11"}, {"window", "300"}}},
      {"softcap", {{"softcap", "20"}}},
      {"dense_mask", {{"mask", "b1qk"}, {"mask_fill", "blocks"}}},
      {"dense_mask_and_bias",
       {{"mask", "bvqk"}, {"mask_fill", "random"}, {"bias", "bvqk"}, {"bias_fill", "normal"}}},
      {"dense_bias_of_heads",
       {{"mask", "bhqk"}, {"mask_fill", "random"}, {"bias", "bhqk"}, {"bias_fill", "normal"}}},
      {"dense_bias_in_f32", {{"bias", "b1qk"}, {"bias_fill", "normal"}, {"bias_dtype", "f32"}}},
  };
  return cases;
}

Data data_of(const RaceCase& c, const char* head_dim) {
  CaseWords words = c.words;
  words.merge(CaseWords{{"name", c.name},
                        {"dtype", "bf16"},
                        {"heads_q", "8"},
                        {"heads_kv", "4"},
                        {"seqlen_q", "1000"},
                        {"seqlen_k", "1000"},
                        {"head_dim", head_dim},
                        {"causal", "1"}});
  return Data(testing::case_from(words));
}

void expect_same_bits_in_launches(const DeviceCase& device_case, int launches) {
  device_case.run_forward();
  const std::vector<std::byte> first = device_case.forward_bits();
  for (int launch = 1; launch < launches; ++launch) {
    device_case.run_forward();
    ASSERT_TRUE(device_case.forward_bits() == first)
        << "launch " << launch << " of " << device_case.forward_kernel();
  }
}

class CudaRaces : public ::testing::TestWithParam<RaceCase> {};

TEST_P(CudaRaces, GiveTheSameBitsInAThousandLaunches) {
  const BackendInfo info = cuda_backend.info();
  if (!info.available) GTEST_SKIP() << info.reason;
  for (const char* const head_dim : {"64", "128", "256"}) {
    Data data = data_of(GetParam(), head_dim);
    expect_same_bits_in_launches(DeviceCase(data, Walk::full_first), 1000);
  }
}

TEST_P(CudaRaces, GiveTheSameDeterministicGradientsInAThousandLaunches) {
  const BackendInfo info = cuda_backend.info();
  if (!info.available) GTEST_SKIP() << info.reason;
  for (const char* const head_dim : {"64", "128"}) {
    Data data = data_of(GetParam(), head_dim);
    data.problem.deterministic = true;
    const DeviceCase device_case(data, Walk::full_first);
    device_case.run_forward();
    device_case.run_backward();
    const std::vector<std::byte> first = device_case.backward_bits();
    for (int launch = 1; launch < 1000; ++launch) {
      device_case.run_backward();
      ASSERT_TRUE(device_case.backward_bits() == first)
          << "launch " << launch << " of " << device_case.backward_kernel();
    }
  }
}

TEST_P(CudaRaces, GiveTheBitsOfKernelsWithoutOverlap) {
  const BackendInfo info = cuda_backend.info();
  if (!info.available) GTEST_SKIP() << info.reason;
  Data data = data_of(GetParam(), "128");
  const DeviceCase device_case(data, Walk::full_first);
  const auto bits = [&](const char* without_overlap) {
    setenv("FLASH_DMATTN_CUDA_NO_OVERLAP", without_overlap, 1);
    device_case.run_forward();
    return device_case.forward_bits();
  };
  const std::vector<std::byte> expected = bits("1");
  const bool exists = device_case.forward_kernel().ends_with("no_overlap");
  const std::vector<std::byte> actual = bits("");
  if (!exists) GTEST_SKIP() << "this build has no kernels without overlap for the GPU";
  EXPECT_TRUE(actual == expected) << device_case.forward_kernel();
}

INSTANTIATE_TEST_SUITE_P(Situations, CudaRaces, ::testing::ValuesIn(race_cases()),
                         [](const auto& test) { return std::string(test.param.name); });

// Rows that cp.async has copied are read by the tensor cores in another proxy; the fence between the two is on the
// readers' side (docs/kernels/sm90.md). A launch gathers 16 heads x 32 query tiles x 9 key tiles.
TEST(CudaProxyFence, GivesTheSameBitsInAMillionGatheredTiles) {
  const BackendInfo info = cuda_backend.info();
  if (!info.available) GTEST_SKIP() << info.reason;
  Data data(testing::case_from({{"name", "gathered"},
                                {"dtype", "bf16"},
                                {"heads_q", "16"},
                                {"heads_kv", "8"},
                                {"seqlen_q", "4096"},
                                {"seqlen_k", "4096"},
                                {"head_dim", "128"},
                                {"causal", "1"},
                                {"bias", "bv1k"},
                                {"bias_fill", "normal"},
                                {"intervals", "per_query"},
                                {"intervals_shape", "bv"},
                                {"window", "1024"}}));
  constexpr int tiles_of_launch = 16 * 32 * 9 - 16 * 36;  // the first queries have fewer keys
  expect_same_bits_in_launches(DeviceCase(data, Walk::full_first), 1'000'000 / tiles_of_launch + 1);
}

}  // namespace
}  // namespace flash_dmattn
