#include <gtest/gtest.h>

#include <vector>

#include "cuda/sm90/backward/work/key_runs.h"

// The order in which blocks of keys add to dq when gradients are deterministic, as host and device compute it.
namespace flash_dmattn::cuda::sm90 {
namespace {

std::vector<int> order_of(int blocks, int run_blocks) {
  std::vector<int> order;
  for (int number = 0; number < blocks; ++number) {
    order.push_back(place_in_run(number, blocks, run_blocks));
  }
  return order;
}

TEST(KeyRuns, ConsecutiveRunsAlternateDirection) {
  EXPECT_EQ(order_of(11, 3), (std::vector{2, 1, 0, 3, 4, 5, 8, 7, 6, 9, 10}));
  EXPECT_EQ(order_of(8, 3), (std::vector{2, 1, 0, 3, 4, 5, 7, 6}));
  EXPECT_EQ(order_of(4, 1), (std::vector{0, 1, 2, 3}));
  EXPECT_EQ(order_of(4, 4), (std::vector{3, 2, 1, 0}));
  EXPECT_EQ(order_of(4, 9), (std::vector{3, 2, 1, 0}));
}

TEST(KeyRuns, AnyRunLengthVisitsEveryBlockOnce) {
  for (int blocks = 1; blocks <= 70; ++blocks) {
    for (int run_blocks = 1; run_blocks <= 75; ++run_blocks) {
      std::vector<int> seen(static_cast<std::size_t>(blocks));
      for (const int block : order_of(blocks, run_blocks)) {
        ASSERT_TRUE(block >= 0 && block < blocks) << blocks << " blocks, runs of " << run_blocks;
        ++seen[static_cast<std::size_t>(block)];
      }
      EXPECT_EQ(seen, std::vector<int>(static_cast<std::size_t>(blocks), 1))
          << blocks << " blocks, runs of " << run_blocks;
    }
  }
}

}  // namespace
}  // namespace flash_dmattn::cuda::sm90
