#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/sm90/backward/key_block_order.h"
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

// A deterministic causal backward of 16 heads with 64 works each, on 132 multiprocessors.
constexpr KeyBlockOrderTraits causal{.heads = 16,
                                     .heads_of_l2 = 4,
                                     .group = 1,
                                     .works = 64,
                                     .at_once = 132,
                                     .consecutive = false,
                                     .ordered = true,
                                     .dense = false,
                                     .causal_from_start = true};

// The order of the backward `causal` after a change to it.
template <class Change>
KeyBlockOrder order_with(const Change& change) {
  KeyBlockOrderTraits traits = causal;
  change(traits);
  return key_block_order(traits);
}

TEST(KeyBlockOrder, UnorderedBlocksFormSectionsOfTheL2) {
  EXPECT_EQ(order_with([](KeyBlockOrderTraits& t) { t.ordered = false; }), (KeyBlockOrder{4, 1}));
  EXPECT_EQ(order_with([](KeyBlockOrderTraits& t) { t.ordered = false, t.dense = true; }),
            (KeyBlockOrder{4, 1}));
}

TEST(KeyBlockOrder, WindowsAndDenseMasksFormOneSectionThatAscends) {
  EXPECT_EQ(order_with([](KeyBlockOrderTraits& t) { t.consecutive = true; }),
            (KeyBlockOrder{16, 1}));
  EXPECT_EQ(order_with([](KeyBlockOrderTraits& t) { t.consecutive = true, t.ordered = false; }),
            (KeyBlockOrder{16, 1}));
  EXPECT_EQ(order_with([](KeyBlockOrderTraits& t) { t.dense = true; }), (KeyBlockOrder{16, 1}));
}

TEST(KeyBlockOrder, CausalBlocksInFlightFormRuns) {
  EXPECT_EQ(key_block_order(causal), (KeyBlockOrder{16, 8}));
  EXPECT_EQ(order_with([](KeyBlockOrderTraits& t) { t.group = 2; }), (KeyBlockOrder{16, 8}));
  // 16 rounds of the GPU are 8 heads, so that there are two sections.
  EXPECT_EQ(order_with([](KeyBlockOrderTraits& t) { t.works = 256; }), (KeyBlockOrder{8, 16}));
  // More works than 16 rounds of the GPU: a section has one head, whose run fills the GPU.
  EXPECT_EQ(order_with([](KeyBlockOrderTraits& t) { t.works = 4096; }), (KeyBlockOrder{1, 132}));
}

TEST(KeyBlockOrder, ManyShortHeadsDescendAsAWhole) {
  const auto many = [](KeyBlockOrderTraits& t) { t.heads = 64, t.works = 16; };
  EXPECT_EQ(order_with(many), (KeyBlockOrder{4, 16}));
  EXPECT_EQ(order_with([&](KeyBlockOrderTraits& t) { many(t), t.group = 2; }),
            (KeyBlockOrder{64, 1}));
}

TEST(KeyBlockOrder, OtherOrderedBlocksFormOneSectionThatAscends) {
  EXPECT_EQ(order_with([](KeyBlockOrderTraits& t) { t.causal_from_start = false; }),
            (KeyBlockOrder{16, 1}));
  EXPECT_EQ(order_with([](KeyBlockOrderTraits& t) { t.group = 4; }), (KeyBlockOrder{16, 1}));
}

TEST(KeyBlockOrder, AnyTraitsGiveSectionsAndRunsWithinBounds) {
  for (int bits = 0; bits < 16; ++bits) {
    for (const int heads : {1, 3, 31, 32, 33, 200}) {
      for (const int works : {1, 7, 64, 5000}) {
        for (const int group : {1, 2, 3}) {
          const KeyBlockOrder order = key_block_order({.heads = heads,
                                                       .heads_of_l2 = (heads + 1) / 2,
                                                       .group = group,
                                                       .works = works,
                                                       .at_once = 66,
                                                       .consecutive = (bits & 1) != 0,
                                                       .ordered = (bits & 2) != 0,
                                                       .dense = (bits & 4) != 0,
                                                       .causal_from_start = (bits & 8) != 0});
          ASSERT_TRUE(order.section_heads >= 1 && order.section_heads <= heads);
          ASSERT_TRUE(order.run_blocks >= 1 && order.run_blocks <= std::max(works, 66));
        }
      }
    }
  }
}

}  // namespace
}  // namespace flash_dmattn::cuda::sm90
