#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/float_types.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/math.cuh"
#include "unit.cuh"

// Conversions to 16 bits against those of the host, for every neighbourhood of a 16-bit number.
namespace flash_dmattn::cuda::unit {
namespace {

class Packing : public CudaUnit {};

// Every bf16 number, those next to the middle of it and its neighbour, and those next to it.
std::vector<float> every_neighbourhood() {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 0x10000u; ++high) {
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const std::uint32_t bits = high << 16 | low;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      values.push_back(value);
    }
  }
  return values;
}

enum class Kind { output, gradient };

template <class T>
struct PackAll {
  const float* from;
  std::uint32_t* to;
  int count;
  Kind kind;
  bool saturate;

  __device__ void operator()(std::byte*) const {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    const float x = from[i];
    const float y = from[count - 1 - i];
    to[i] =
        kind == Kind::output ? pack_output<T>(x, y, saturate) : pack_gradient<T>(x, y, saturate);
  }
};

std::uint16_t round_to_nearest(__nv_bfloat16, float x) { return float_to_bf16(x); }
std::uint16_t round_to_nearest(__half, float x) { return float_to_f16(x); }
float widened(__nv_bfloat16, std::uint16_t bits) { return bf16_to_float(bits); }
float widened(__half, std::uint16_t bits) { return f16_to_float(bits); }

template <class T>
void expect_packed(std::uint16_t actual, float x, Kind kind, bool saturate) {
  const std::uint16_t rounded = round_to_nearest(T{}, x);
  const bool is_bf16 = Element<T>::dtype == DType::bf16;
  const std::uint16_t limit = !is_bf16 ? 0x7bff : kind == Kind::output ? 0x7f7f : 0x7eff;
  if (!saturate) {
    const bool same = actual == rounded || (std::isnan(x) && std::isnan(widened(T{}, actual)));
    ASSERT_TRUE(same) << x << " became " << actual << " instead of " << rounded;
  } else if (std::isnan(x)) {
    ASSERT_EQ(actual, limit) << "NaN";
  } else {
    const std::uint16_t magnitude = rounded & 0x7fff;
    const std::uint16_t clamped = magnitude > limit ? limit : magnitude;
    ASSERT_EQ(actual, (rounded & 0x8000) | clamped) << x;
  }
}

template <class T>
void expect_all_packed() {
  const std::vector<float> values = every_neighbourhood();
  const int count = static_cast<int>(values.size());
  const DeviceArray<float> from(values);
  const DeviceArray<std::uint32_t> to(values.size());
  for (const Kind kind : {Kind::output, Kind::gradient}) {
    for (const bool saturate : {false, true}) {
      SCOPED_TRACE(std::string(kind == Kind::output ? "output" : "gradient") +
                   (saturate ? ", saturate" : ", propagate"));
      run((count + 255) / 256, 256, 0, PackAll<T>{from.data(), to.data(), count, kind, saturate});
      const std::vector<std::uint32_t> packed = to.values();
      for (std::size_t i = 0; i < values.size(); ++i) {
        expect_packed<T>(static_cast<std::uint16_t>(packed[i]), values[i], kind, saturate);
        expect_packed<T>(static_cast<std::uint16_t>(packed[i] >> 16), values[values.size() - 1 - i],
                         kind, saturate);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(Packing, Bf16RoundsAndSaturates) { expect_all_packed<__nv_bfloat16>(); }
TEST_F(Packing, F16RoundsAndSaturates) { expect_all_packed<__half>(); }

struct Tanh {
  const float* from;
  float* to;
  int count;

  __device__ void operator()(std::byte*) const {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) to[i] = tanh_from_log2(2 * log2e * from[i]);
  }
};

TEST_F(Packing, TanhHasAnAbsoluteErrorOfAFewUlp) {
  std::vector<float> values;
  for (int i = -40000; i <= 40000; ++i) values.push_back(static_cast<float>(i) / 2000);
  const DeviceArray<float> from(values);
  const DeviceArray<float> to(values.size());
  const int count = static_cast<int>(values.size());
  run((count + 255) / 256, 256, 0, Tanh{from.data(), to.data(), count});
  const std::vector<float> results = to.values();
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(results[i], std::tanh(static_cast<double>(values[i])), 5e-7) << values[i];
  }
}

}  // namespace
}  // namespace flash_dmattn::cuda::unit
