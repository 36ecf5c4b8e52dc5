#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "cuda/stages/zero_sum.h"
#include "support/random.h"
#include "unit.cuh"

// Rows whose elements that are not 0 sum to 0 afterwards.
namespace flash_dmattn::cuda::unit {
namespace {

struct ZeroSum : CudaUnit {};

std::vector<float> zero_sum_of(const std::vector<float>& rows, std::int64_t columns) {
  const DeviceArray<float> gradient(rows);
  const DeviceArray<float> out(rows.size());
  make_zero_sum(gradient.data(), out.data(), static_cast<std::int64_t>(rows.size()) / columns,
                columns, {});
  testing::check_cuda(cudaDeviceSynchronize());
  return out.values();
}

TEST_F(ZeroSum, SharedPartIsRemovedAndZerosStay) {
  for (const std::int64_t columns : {1, 31, 1000, 1024, 5003}) {
    constexpr std::int64_t rows = 3;
    testing::Random random(static_cast<std::uint64_t>(columns));
    std::vector<float> gradient(static_cast<std::size_t>(rows * columns));
    for (float& x : gradient) {
      x = random.below(4) == 0 ? 0.f : static_cast<float>(random.normal()) + 0.5f;
    }
    std::fill(gradient.begin() + columns, gradient.begin() + 2 * columns, 0.f);
    const std::vector<float> out = zero_sum_of(gradient, columns);
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto row = gradient.begin() + r * columns;
      double sum = 0;
      for (auto x = row; x != row + columns; ++x) sum += *x;
      const auto count = columns - std::count(row, row + columns, 0.f);
      for (std::int64_t i = 0; i < columns; ++i) {
        const double expected = row[i] == 0 ? 0 : row[i] - sum / static_cast<double>(count);
        EXPECT_NEAR(out[static_cast<std::size_t>(r * columns + i)], expected, 1e-6)
            << r << ' ' << i;
      }
    }
  }
}

TEST_F(ZeroSum, LargestNumbersStayFinite) {
  std::vector<float> gradient(40, -FLT_MAX);
  gradient[7] = FLT_MAX;
  const std::vector<float> out = zero_sum_of(gradient, 40);
  EXPECT_EQ(out[7], FLT_MAX);
  for (const float x : out) EXPECT_TRUE(std::isfinite(x));
  EXPECT_FLOAT_EQ(out[0], -FLT_MAX / 20);
}

}  // namespace
}  // namespace flash_dmattn::cuda::unit
