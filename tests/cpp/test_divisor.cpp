#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>

#include "cuda/primitives/divisor.h"

namespace flash_dmattn::cuda {
namespace {

constexpr std::int32_t largest = std::numeric_limits<std::int32_t>::max();

// Tests around the multiples of a divisor, where a multiplier that is too small or too large fails first.
void expect_exact(std::int32_t divisor, std::int32_t quotient) {
  const Divisor by(divisor);
  for (std::int64_t n = std::int64_t{quotient} * divisor - 2;
       n <= std::int64_t{quotient} * divisor + 2; ++n) {
    if (n < 0 || n > largest) continue;
    const auto number = static_cast<std::int32_t>(n);
    ASSERT_EQ(by.divide(number), number / divisor) << number << " / " << divisor;
  }
}

TEST(Divisor, QuotientsAreExact) {
  std::mt19937 random(1);
  const auto check = [&](std::int32_t divisor) {
    const std::int32_t quotients = largest / divisor;
    for (const std::int32_t quotient : {0, 1, 2, quotients - 1, quotients})
      expect_exact(divisor, quotient);
    expect_exact(divisor, std::uniform_int_distribution<std::int32_t>(0, quotients)(random));
    EXPECT_EQ(Divisor(divisor).divide(largest), largest / divisor) << divisor;
  };
  for (std::int32_t divisor = 1; divisor <= 70000; ++divisor) check(divisor);
  for (int bits = 1; bits < 31; ++bits) {
    for (const std::int32_t offset : {-1, 0, 1}) check((1 << bits) + offset);
  }
  for (const std::int32_t divisor : {largest, largest - 1, largest / 2, largest / 2 + 1})
    check(divisor);
  for (int i = 0; i < 100000; ++i)
    check(std::uniform_int_distribution<std::int32_t>(1, largest)(random));
}

}  // namespace
}  // namespace flash_dmattn::cuda
