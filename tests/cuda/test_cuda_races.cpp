#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <future>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend.h"
#include "device_case.h"
#include "launch_bits.h"
#include "support/cases.h"

// Looks for races among the producers and consumers of a kernel. A wait or a fence that is missing shows as bits that
// differ between launches, or from those of a kernel whose products overlap with nothing.
namespace flash_dmattn::testing {
namespace {

struct RaceCase {
  const char* name;
  CaseWords words;
};

const RaceCase selection = {"selection",
                            {{"bias", "bv1k"},
                             {"bias_fill", "normal"},
                             {"intervals", "per_query"},
                             {"intervals_shape", "bv"},
                             {"window", "300"}}};

const std::vector<RaceCase>& race_cases() {
  static const std::vector<RaceCase> cases = {
      {"plain", {}},
      {"full", {{"causal", "0"}}},
      selection,
      {"sliding", {{"intervals", "sliding"}, {"intervals_shape", "11"}, {"window", "300"}}},
      {"documents", {{"intervals", "packed"}, {"intervals_shape", "11"}, {"window", "300"}}},
      {"global",
       {{"bias", "bv1k"},
        {"bias_fill", "normal"},
        {"intervals", "global"},
        {"intervals_shape", "bv"},
        {"window", "300"}}},
      {"delayed_bias", {{"bias", "bv1k"}, {"bias_fill", "normal"}, {"bias_delay", "200"}}},
      {"delayed_bias_of_a_selection",
       {{"bias", "bv1k"},
        {"bias_fill", "normal"},
        {"bias_delay", "200"},
        {"intervals", "per_query"},
        {"intervals_shape", "bv"},
        {"window", "300"}}},
      {"softcap", {{"softcap", "20"}}},
      {"propagate", {{"nonfinite", "propagate"}}},
      {"negative_scale", {{"scale", "-0.1"}}},
      {"stride_of_zero", {{"layout", "expanded"}}},
      {"dense_mask", {{"mask", "b1qk"}, {"mask_fill", "blocks"}}},
      {"dense_mask_and_bias",
       {{"mask", "bvqk"}, {"mask_fill", "random"}, {"bias", "bvqk"}, {"bias_fill", "normal"}}},
      {"dense_bias_of_heads",
       {{"mask", "bhqk"}, {"mask_fill", "random"}, {"bias", "bhqk"}, {"bias_fill", "normal"}}},
      {"dense_bias_in_f32", {{"bias", "b1qk"}, {"bias_fill", "normal"}, {"bias_dtype", "f32"}}},
  };
  return cases;
}

// The head dimension of q and k, and that of v; 0: the same.
struct HeadDims {
  const char* head_dim;
  const char* value_dim;
};
constexpr std::array race_head_dims = {HeadDims{"64", "0"},    HeadDims{"96", "0"},
                                       HeadDims{"128", "0"},   HeadDims{"192", "0"},
                                       HeadDims{"192", "128"}, HeadDims{"256", "0"}};

Data data_of(const RaceCase& c, const HeadDims& dims) {
  CaseWords words = c.words;
  words.merge(CaseWords{{"name", c.name},
                        {"dtype", "bf16"},
                        {"heads_q", "8"},
                        {"heads_kv", "4"},
                        {"seqlen_q", "1000"},
                        {"seqlen_k", "1000"},
                        {"head_dim", dims.head_dim},
                        {"value_dim", dims.value_dim},
                        {"causal", "1"}});
  return Data(case_from(words));
}

// Kernels by keys that hold dk and dv until they are complete; those by queries, and older ones, add in memory.
bool stores_key_gradients_once(const std::string& kernel) { return kernel.starts_with("sm90 "); }

// Elements of a dense bias that more than two heads share are added in memory.
bool stores_dbias_once(const Problem& p) {
  const bool dense = p.bias_shape[2] > 1;
  return !dense || 2 * p.bias_shape[1] >= p.heads_q;
}

// ---- Many launches --------------------------------------------------------------------------------------

// Expects that further launches leave the same bits. The first has been.
template <class Launch>
void expect_same_bits(const DeviceCase::Outputs& outputs, const std::string& kernel, int launches,
                      const Launch& launch) {
  LaunchBits bits(outputs);
  for (int i = 1; i < launches; ++i) {
    launch();
    ASSERT_TRUE(bits.are_the_same()) << "launch " << i << " of " << kernel;
  }
}

void expect_same_bits_in_forwards(DeviceCase& device_case, int launches) {
  device_case.launch_forward();
  expect_same_bits(device_case.forward_outputs(), device_case.forward_kernel(), launches,
                   [&] { device_case.launch_forward(); });
}

// All gradients, of a deterministic problem.
void expect_same_bits_in_backwards(DeviceCase& device_case, int launches) {
  device_case.launch_forward();
  device_case.launch_backward();
  expect_same_bits(device_case.gradients(), device_case.backward_kernel(), launches,
                   [&] { device_case.launch_backward(); });
}

// dk and dv, and dbias where it is stored once; dq within the rounding of its sums.
void expect_same_key_gradients_in_backwards(DeviceCase& device_case, bool dbias, int launches) {
  device_case.launch_forward();
  device_case.launch_backward();
  DeviceCase::Outputs outputs = device_case.key_gradients();
  if (dbias) outputs.push_back(&device_case.dbias());
  LaunchSums dq(device_case.dq());
  expect_same_bits(outputs, device_case.backward_kernel(), launches, [&] {
    device_case.launch_backward();
    ASSERT_TRUE(dq.are_close()) << "dq of " << device_case.backward_kernel();
  });
}

class CudaRaces : public OnDevice, public ::testing::WithParamInterface<RaceCase> {};

TEST_P(CudaRaces, ThousandForwardsGiveSameBits) {
  for (const HeadDims& dims : race_head_dims) {
    Data data = data_of(GetParam(), dims);
    DeviceCase device_case(data, Walk::schedule);
    expect_same_bits_in_forwards(device_case, 1000);
  }
}

TEST_P(CudaRaces, ThousandDeterministicBackwardsGiveSameBits) {
  for (const HeadDims& dims : race_head_dims) {
    Data data = data_of(GetParam(), dims);
    data.problem.deterministic = true;
    DeviceCase device_case(data, Walk::schedule);
    expect_same_bits_in_backwards(device_case, 1000);
  }
}

// Without an order of additions a block waits for no other, so that their times differ more.
TEST_P(CudaRaces, ThousandBackwardsGiveSameKeyGradients) {
  int compared = 0;
  for (const HeadDims& dims : race_head_dims) {
    Data data = data_of(GetParam(), dims);
    DeviceCase device_case(data, Walk::schedule);
    if (!stores_key_gradients_once(device_case.backward_kernel())) continue;
    expect_same_key_gradients_in_backwards(device_case, stores_dbias_once(data.problem), 1000);
    ++compared;
  }
  if (compared == 0) GTEST_SKIP() << "the kernels of this case add to dk and dv in any order";
}

// ---- Kernels without overlap ----------------------------------------------------------------------------

class WithoutOverlap {
 public:
  WithoutOverlap() { setenv("FLASH_DMATTN_CUDA_NO_OVERLAP", "1", 1); }
  ~WithoutOverlap() { unsetenv("FLASH_DMATTN_CUDA_NO_OVERLAP"); }
  WithoutOverlap(const WithoutOverlap&) = delete;
  WithoutOverlap& operator=(const WithoutOverlap&) = delete;
};

TEST_P(CudaRaces, ForwardMatchesKernelWithoutOverlap) {
  Data data = data_of(GetParam(), {"128", "0"});
  DeviceCase device_case(data, Walk::schedule);
  std::optional<LaunchBits> bits;
  {
    const WithoutOverlap without_overlap;
    if (!device_case.forward_kernel().ends_with("no_overlap")) {
      GTEST_SKIP() << "this build has no kernel without overlap for the call";
    }
    device_case.launch_forward();
    bits.emplace(device_case.forward_outputs());
  }
  device_case.launch_forward();
  EXPECT_TRUE(bits->are_the_same()) << device_case.forward_kernel();
}

TEST_P(CudaRaces, BackwardMatchesKernelWithoutOverlap) {
  Data data = data_of(GetParam(), {"128", "0"});
  data.problem.deterministic = true;
  DeviceCase device_case(data, Walk::schedule);
  device_case.launch_forward();
  std::optional<LaunchBits> bits;
  {
    const WithoutOverlap without_overlap;
    if (!device_case.backward_kernel().ends_with("no_overlap")) {
      GTEST_SKIP() << "this build has no kernel without overlap for the call";
    }
    device_case.launch_backward();
    bits.emplace(device_case.gradients());
  }
  device_case.launch_backward();
  EXPECT_TRUE(bits->are_the_same()) << device_case.backward_kernel();
}

// ---- Proxy fences ---------------------------------------------------------------------------------------

// The tensor cores and bulk copies read, in another proxy, shared memory that threads or cp.async have written. A
// fence is between the two (docs/kernels/sm90.md); here a million tiles cross it.
class CudaProxyFence : public OnDevice {
 protected:
  static constexpr int tiles = 1'000'000;
  static constexpr int heads = 16;
  static constexpr int window = 1024;

  static Data long_data(const CaseWords& words, int seqlen = 4096) {
    const std::string length = std::to_string(seqlen);
    CaseWords longer = {
        {"name", "long"},    {"dtype", "bf16"},    {"heads_q", std::to_string(heads)},
        {"heads_kv", "8"},   {"seqlen_q", length}, {"seqlen_k", length},
        {"head_dim", "128"}, {"causal", "1"},      {"window", std::to_string(window)}};
    longer.insert(words.begin(), words.end());
    return Data(case_from(longer));
  }
};

// Rows of K and V. A head has 32 query tiles of 8 or 9 tiles of its list, except for the first eight.
TEST_F(CudaProxyFence, MillionGatheredTilesGiveSameBits) {
  Data data = long_data(selection.words);
  DeviceCase device_case(data, Walk::schedule);
  constexpr int tiles_of_launch = heads * (32 * 8 - 8 * 8 / 2);
  expect_same_bits_in_forwards(device_case, tiles / tiles_of_launch + 1);
}

// dS for the products dQ, and dQ for its additions in memory. Key tile i of 32 has 64 - 2 i query tiles of 64.
TEST_F(CudaProxyFence, MillionBlockTilesGiveSameBits) {
  Data data = long_data({});
  data.problem.deterministic = true;
  DeviceCase device_case(data, Walk::schedule);
  constexpr int tiles_of_launch = heads * (32 * 64 - 31 * 32);
  expect_same_bits_in_backwards(device_case, tiles / tiles_of_launch + 1);
}

// The same, and rows of K and V that come while products run. Nine blocks of slots visit 64 query tiles.
TEST_F(CudaProxyFence, MillionSlotTilesGiveSameBits) {
  Data data = long_data(selection.words);
  data.problem.deterministic = true;
  DeviceCase device_case(data, Walk::schedule);
  constexpr int tiles_of_launch = heads * (window + 128) / 128 * 64;
  expect_same_bits_in_backwards(device_case, tiles / tiles_of_launch + 1);
}

// The same, and dS for the sums of dbias of two heads, which the TMA unit stores. Key tile i of 16 has 32 - 2 i query
// tiles; the elements above the diagonal become zero.
TEST_F(CudaProxyFence, MillionDenseBiasTilesGiveSameBits) {
  Data data = long_data({{"bias", "bvqk"}, {"bias_fill", "normal"}}, 2048);
  data.problem.deterministic = true;
  DeviceCase device_case(data, Walk::schedule);
  const std::string kernel = device_case.backward_kernel();
  EXPECT_TRUE(!kernel.starts_with("sm90 ") || kernel.ends_with(" dense")) << kernel;
  constexpr int tiles_of_launch = heads * (16 * 32 - 15 * 16);
  expect_same_bits_in_backwards(device_case, tiles / tiles_of_launch + 1);
}

// ---- Streams and devices --------------------------------------------------------------------------------

Data deterministic_data(const RaceCase& c) {
  Data data = data_of(c, {"128", "0"});
  data.problem.deterministic = true;
  return data;
}

// Two calls at once share the multiprocessors, and those whose blocks wait for each other have to end.
TEST_P(CudaRaces, ConcurrentStreamsGiveSameBits) {
  Data data = deterministic_data(GetParam());
  Data other_data = deterministic_data(selection);  // blocks wait in both directions
  DeviceCase here(data, Walk::schedule);
  DeviceCase there(other_data, Walk::schedule);
  const Stream streams[2];
  for (DeviceCase* const device_case : {&here, &there}) {
    device_case->launch_forward();
    device_case->launch_backward();
  }
  LaunchBits out(here.forward_outputs());
  LaunchBits gradients(here.gradients());
  LaunchBits other_gradients(there.gradients());
  for (int round = 0; round < 20; ++round) {
    for (int launch = 0; launch < 10; ++launch) {
      for (const auto& [device_case, stream] :
           {std::pair{&here, &streams[0]}, std::pair{&there, &streams[1]}}) {
        device_case->launch_forward(*stream);
        device_case->launch_backward(*stream);
      }
    }
    check_cuda(cudaDeviceSynchronize());
    ASSERT_TRUE(out.are_the_same() && gradients.are_the_same()) << "round " << round;
    ASSERT_TRUE(other_gradients.are_the_same()) << "of the other stream, round " << round;
  }
}

// The bits of a case on a device, after some launches.
std::vector<std::byte> bits_on_device(int device, const RaceCase& c) {
  check_cuda(cudaSetDevice(device));
  Data data = deterministic_data(c);
  DeviceCase device_case(data, Walk::schedule);
  for (int launch = 0; launch < 10; ++launch) {
    device_case.launch_forward();
    device_case.launch_backward();
  }
  check_cuda(cudaDeviceSynchronize());
  std::vector<std::byte> bits;
  for (const auto& outputs : {device_case.forward_outputs(), device_case.gradients()}) {
    for (const DeviceTensor* tensor : outputs) {
      bits.resize(bits.size() + tensor->bytes());
      tensor->download(bits.data() + bits.size() - tensor->bytes());
    }
  }
  return bits;
}

// One thread per device at the same time: the state that the library keeps for a device belongs to that device.
TEST_P(CudaRaces, TwoDevicesGiveSameBits) {
  int devices = 0;
  check_cuda(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "there is one GPU";
  const auto on_device = [](int device) {
    return std::async(std::launch::async, [=] { return bits_on_device(device, GetParam()); });
  };
  auto first = on_device(0);
  auto second = on_device(1);
  EXPECT_TRUE(first.get() == second.get());
}

INSTANTIATE_TEST_SUITE_P(Situations, CudaRaces, ::testing::ValuesIn(race_cases()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace flash_dmattn::testing
