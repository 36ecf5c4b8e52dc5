#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "common/float_types.h"
#include "device.h"
#include "flash_dmattn/calls.h"
#include "support/random.h"

// Projections of scores on the device have the bits of those on the CPU. Other forms equal those up to rounding, and have the same
// bits in a call of one token.
namespace flash_dmattn::testing {
namespace {

class SmallCudaScoreProjection : public OnDevice {};
class CudaScoreProjection : public OnDevice {};

// Numbers of a dtype on the host and on the device, from `offset` elements after an address of any alignment.
class Numbers {
 public:
  Numbers(DType dtype, std::int64_t count, std::int64_t offset, Random& random)
      : offset_(offset * size_of(dtype)),
        host_(static_cast<std::size_t>((count + offset) * size_of(dtype))),
        device_(host_.size()) {
    for (std::int64_t i = 0; i < count + offset; ++i)
      store(host_.data(), dtype, i, random.normal());
    device_.upload(host_.data());
  }
  const void* host() const { return host_.data() + offset_; }
  const void* device() const { return device_.data() + offset_; }

 private:
  std::int64_t offset_;
  std::vector<std::byte> host_;
  DeviceBuffer device_;
};

// hidden has `padding` elements after every token, and arrays begin `offset` elements off alignment.
void expect_bits_of_cpu(ScoreProjectionArgs args, std::int64_t padding, std::int64_t offset,
                        bool has_bias, Random& random) {
  const std::int64_t row = args.features + padding;
  args.hidden_stride = {args.seqlen * row, row};
  args.weight_stride = row;
  const Numbers hidden(args.hidden_dtype, args.batch * args.seqlen * row, offset, random);
  const Numbers weight(args.weight_dtype, args.heads * row, offset, random);
  const Numbers bias(args.bias_dtype, args.heads, offset, random);
  const Numbers factor(args.factor_dtype, args.heads, offset, random);
  const std::int64_t count = args.batch * args.heads * args.seqlen;
  std::vector<float> expected(static_cast<std::size_t>(count));
  args.hidden = hidden.host();
  args.weight = weight.host();
  args.factor = factor.host();
  if (has_bias) args.bias = bias.host();
  args.scores = expected.data();
  project_scores(args, sequential_execution(1));
  const DeviceBuffer scores(expected.size() * sizeof(float));
  args.device = Device::cuda;
  args.hidden = hidden.device();
  args.weight = weight.device();
  args.factor = factor.device();
  if (has_bias) args.bias = bias.device();
  args.scores = scores.data();
  run_on_device(ScoreProjectionCall(args, {}));
  const std::vector<float> actual = download<float>(scores, count);
  SCOPED_TRACE(::testing::Message()
               << args.batch << " rows of " << args.seqlen << " tokens, " << args.features
               << " features, " << args.heads << " heads, " << name_of(args.hidden_dtype)
               << ", weights " << name_of(args.weight_dtype) << ", form "
               << static_cast<int>(args.form) << ", padding " << padding << ", offset " << offset);
  if (args.form == ScoreForm::projection) {
    ASSERT_EQ(actual, expected);
  } else {
    // exp makes relative errors of the exponent, which is at most 88.
    for (std::size_t i = 0; i < actual.size(); ++i) {
      ASSERT_NEAR(actual[i], expected[i], 4e-5f * (1e-2f + std::abs(expected[i]))) << i;
    }
  }
  if (count == 0) return;
  const std::int64_t length = args.seqlen, last = args.batch * length - 1;
  args.hidden =
      static_cast<const std::byte*>(args.hidden) + last * row * size_of(args.hidden_dtype);
  args.batch = args.seqlen = 1;
  run_on_device(ScoreProjectionCall(args, {}));
  const std::vector<float> alone = download<float>(scores, count);
  for (std::int64_t h = 0; h < args.heads; ++h) {
    const std::int64_t at = count - 1 - (args.heads - 1 - h) * length;
    ASSERT_EQ(alone[static_cast<std::size_t>(h)], actual[static_cast<std::size_t>(at)]) << h;
  }
}

ScoreProjectionArgs random_shape(std::int64_t most_tokens, Random& random) {
  constexpr std::int64_t features[] = {0, 1, 2, 63, 64, 66, 127, 256, 320, 1000, 1024, 4096};
  ScoreProjectionArgs args;
  args.batch = random.below(4);
  args.seqlen = random.below(most_tokens);
  args.features = features[random.below(std::size(features))];
  args.heads = random.below(34);
  args.hidden_dtype = static_cast<DType>(random.below(3));
  args.weight_dtype = random.below(2) == 0 ? DType::f32 : args.hidden_dtype;
  args.bias_dtype = random.below(2) == 0 ? DType::f32 : args.hidden_dtype;
  args.factor_dtype = random.below(2) == 0 ? DType::f32 : args.hidden_dtype;
  args.form = static_cast<ScoreForm>(random.below(5));
  return args;
}

TEST_F(SmallCudaScoreProjection, BitsAreThoseOfCpu) {
  Random random(21);
  for (int round = 0; round < 60; ++round) {
    expect_bits_of_cpu(random_shape(20, random), random.below(3), random.below(2),
                       random.below(2) == 0, random);
    if (HasFatalFailure()) return;
  }
}

// Enough tokens for the kernels that compute several at a time, with each number of heads.
TEST_F(CudaScoreProjection, BitsOfManyTokensAreThoseOfCpu) {
  Random random(22);
  for (std::int64_t heads : {1, 2, 3, 4, 5, 8, 9, 32}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const DType weight : {DType::f32, dtype}) {
        ScoreProjectionArgs args = random_shape(2, random);
        args.batch = 2;
        args.seqlen = 2501;
        args.features = 330;
        args.heads = heads;
        args.hidden_dtype = dtype;
        args.weight_dtype = args.bias_dtype = args.factor_dtype = weight;
        expect_bits_of_cpu(args, 2 * random.below(2), 2 * random.below(2), true, random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace flash_dmattn::testing
