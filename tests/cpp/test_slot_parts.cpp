#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "cuda/sm90/slots/parts.h"
#include "support/random.h"

// The division of chains of slots among blocks, computed by one thread.
namespace flash_dmattn::cuda::sm90 {
namespace {

struct OneThread {
  template <class Body>
  void for_each(int n, const Body& body) const {
    for (int i = 0; i < n; ++i) body(i);
  }
  template <class Value>
  int sum(int n, const Value& value) const {
    int sum = 0;
    for (int i = 0; i < n; ++i) sum += value(i);
    return sum;
  }
  template <class Value>
  int most(int n, const Value& value) const {
    int most = 0;
    for (int i = 0; i < n; ++i) most = std::max(most, value(i));
    return most;
  }
  void scan(int* numbers, int n) const {
    int before = 0;
    for (int i = 0; i <= n; ++i) {
      const int mine = i < n ? numbers[i] : 0;
      numbers[i] = before;
      before += mine;
    }
  }
};

// The first unit of each chain of each head.
struct Heads {
  std::vector<std::vector<int>> firsts;

  int chains(int head) const { return static_cast<int>(firsts[at(head)].size()); }
  int first_unit(int head, int chain) const { return firsts[at(head)][at(chain)]; }
  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
};

// A plan in memory of exactly the promised size, where every element is -7 that was not written.
struct Planned {
  SlotPlanShape shape;
  std::vector<SlotPart> parts, cut;
  std::vector<int> block_parts;
  SlotPlan::Counts counts{-7, -7};

  Planned(const SlotPlanShape& shape_, const Heads& heads)
      : shape(shape_),
        parts(Heads::at(shape.most_parts()), SlotPart{-7, -7, -7, -7, -7, -7}),
        cut(Heads::at(shape.most_cut_parts()), SlotPart{-7, -7, -7, -7, -7, -7}),
        block_parts(Heads::at(shape.blocks + 1), -7) {
    std::vector<int> scratch(Heads::at(shape.scratch()));
    SlotPlanner(OneThread{}, shape, heads, scratch.data())
        .make({parts.data(), cut.data(), block_parts.data(), &counts});
  }

  // The parts of each block, in the order in which the block computes them, without parts that have no units.
  std::vector<std::vector<SlotPart>> of_blocks() {
    const SlotPlan plan{parts.data(), cut.data(), block_parts.data(), &counts};
    std::vector<std::vector<SlotPart>> result(Heads::at(shape.blocks));
    for (int block = 0; block < shape.blocks; ++block) {
      for (int number = 0;; ++number) {
        const int place = plan.part(shape.blocks, block, number);
        if (place < 0) break;
        const SlotPart& part = parts.at(Heads::at(place));
        if (part.unit_begin < part.unit_end) result[Heads::at(block)].push_back(part);
      }
    }
    return result;
  }
};

using BlockParts = std::vector<std::vector<SlotPart>>;

int first_unit(const Planned& plan, const Heads& heads, int head, int chain) {
  return plan.shape.ordered ? 0 : std::min(heads.first_unit(head, chain), plan.shape.units - 1);
}

// Expects that parts contain each unit of a chain from its first on, once, and that the parts with ids are those that
// begin or end inside a chain, in the order of chains and time.
void expect_every_unit_once(const Planned& plan, const Heads& heads, const BlockParts& blocks) {
  std::vector<std::vector<std::vector<int>>> covered;
  for (const auto& firsts : heads.firsts)
    covered.emplace_back(firsts.size(), std::vector<int>(Heads::at(plan.shape.units), 0));
  int cut_parts = 0;
  for (const auto& parts : blocks) {
    for (const SlotPart& part : parts) {
      for (int unit = part.unit_begin; unit < part.unit_end; ++unit)
        ++covered.at(Heads::at(part.head)).at(Heads::at(part.block)).at(Heads::at(unit));
      const int first = first_unit(plan, heads, part.head, part.block);
      if (part.unit_begin <= first && part.unit_end == plan.shape.units) continue;
      ++cut_parts;
      ASSERT_LT(part.id, plan.counts.cut_parts);
      const SlotPart& cut = plan.cut.at(Heads::at(part.id));
      ASSERT_EQ(cut.head, part.head);
      ASSERT_EQ(cut.block, part.block);
      ASSERT_EQ(cut.unit_begin, part.unit_begin);
      ASSERT_EQ(cut.unit_end, part.unit_end);
      ASSERT_EQ(cut.id, part.id);
    }
  }
  ASSERT_EQ(plan.counts.cut_parts, cut_parts);
  for (int id = 1; id < cut_parts; ++id) {
    const SlotPart& part = plan.cut[Heads::at(id)];
    const SlotPart& before = plan.cut[Heads::at(id - 1)];
    if (part.head == before.head && part.block == before.block) {
      ASSERT_EQ(part.unit_begin, before.unit_end);
    } else {
      ASSERT_EQ(before.unit_end, plan.shape.units);
      ASSERT_TRUE(part.head > before.head || part.block > before.block);
    }
  }
  for (std::size_t head = 0; head < covered.size(); ++head) {
    for (std::size_t chain = 0; chain < covered[head].size(); ++chain) {
      const int first = first_unit(plan, heads, static_cast<int>(head), static_cast<int>(chain));
      for (int unit = 0; unit < plan.shape.units; ++unit)
        ASSERT_EQ(covered[head][chain][Heads::at(unit)], unit < first ? 0 : 1);
    }
  }
}

// With ordered sums, the chains of a kv head add at every unit in the order of their positions. All blocks run at once.
// No block may wait for a part that has not begun and that belongs to the same block or to a waiting block.
void expect_progress(const Planned& plan, const Heads& heads, const BlockParts& parts) {
  struct Block {
    std::size_t part = 0;
    int done = 0;  // units of the part
  };
  std::vector<Block> blocks(parts.size());
  std::vector<std::vector<int>> added(heads.firsts.size(),
                                      std::vector<int>(Heads::at(plan.shape.units), 0));
  for (bool progress = true; progress;) {
    progress = false;
    for (std::size_t b = 0; b < parts.size(); ++b) {
      while (blocks[b].part < parts[b].size()) {
        const SlotPart& part = parts[b][blocks[b].part];
        int& count = added[Heads::at(part.head)][Heads::at(part.unit_begin + blocks[b].done)];
        if (count != part.position) break;
        ++count;
        progress = true;
        if (++blocks[b].done == part.unit_end - part.unit_begin)
          blocks[b] = {.part = blocks[b].part + 1};
      }
    }
  }
  for (std::size_t head = 0; head < added.size(); ++head) {
    ASSERT_EQ(
        std::count(added[head].begin(), added[head].end(), heads.chains(static_cast<int>(head))),
        plan.shape.units);
  }
}

int units_of(const std::vector<SlotPart>& parts) {
  int units = 0;
  for (const SlotPart& part : parts) units += part.unit_end - part.unit_begin;
  return units;
}

// Chains of heads with different numbers of slots, or of as many; some begin late, some heads have none.
Heads random_heads(testing::Random& random, int heads, int row_blocks, int units) {
  const bool equal = random.below(3) == 0;
  const bool late = random.below(2) == 0;
  Heads result;
  for (int head = 0; head < heads; ++head) {
    const auto chains = equal ? row_blocks : static_cast<int>(random.below(row_blocks + 1));
    std::vector<int> firsts(Heads::at(chains), 0);
    for (int& first : firsts) first = late ? static_cast<int>(random.below(units + 1)) : 0;
    std::sort(firsts.begin(), firsts.end());
    result.firsts.push_back(firsts);
  }
  return result;
}

TEST(SlotPlan, RandomChainsAreCoveredOnceAndDoNotDeadlock) {
  testing::Random random(1);
  for (int round = 0; round < 3000; ++round) {
    SlotPlanShape shape;
    shape.heads = 1 + static_cast<int>(random.below(20));
    shape.row_blocks = 1 + static_cast<int>(random.below(12));
    shape.units = 1 + static_cast<int>(random.below(64));
    shape.blocks = 1 + static_cast<int>(random.below(140));
    shape.ordered = random.below(2) == 0;
    const Heads heads = random_heads(random, shape.heads, shape.row_blocks, shape.units);
    SCOPED_TRACE("round " + std::to_string(round) + ": " + std::to_string(shape.heads) +
                 " heads, " + std::to_string(shape.units) + " units on " +
                 std::to_string(shape.blocks) + " blocks" + (shape.ordered ? ", ordered" : ""));
    Planned plan(shape, heads);
    const BlockParts blocks = plan.of_blocks();
    expect_every_unit_once(plan, heads, blocks);
    if (shape.ordered) expect_progress(plan, heads, blocks);
    if (HasFatalFailure()) return;
    if (shape.ordered) continue;
    int all = 0;
    int most = 0;
    for (const auto& parts : blocks) {
      all += units_of(parts);
      most = std::max(most, units_of(parts));
    }
    const int equal = (all + shape.blocks - 1) / shape.blocks;
    ASSERT_LE(most, equal + std::max(1, equal / 32));
  }
}

// Heads whose slots are all in use have one whole chain for each block, and blocks of a head visit the same query tiles.
TEST(SlotPlan, EqualHeadsKeepWholeChains) {
  const SlotPlanShape shape{.heads = 8, .row_blocks = 17, .units = 64, .blocks = 132};
  Planned plan(shape, {std::vector(8, std::vector<int>(17, 0))});
  EXPECT_EQ(plan.counts.whole, 132);
  EXPECT_LE(plan.counts.cut_parts, 2 * 132);
  for (const auto& parts : plan.of_blocks()) {
    ASSERT_FALSE(parts.empty());
    EXPECT_EQ(parts.back().unit_end - parts.back().unit_begin, 64);
  }
}

TEST(SlotPlan, OrderedPiecesHaveCommonCuts) {
  const SlotPlanShape shape{
      .heads = 4, .row_blocks = 11, .units = 60, .blocks = 132, .ordered = true};
  Heads heads{std::vector(4, std::vector<int>(11, 0))};
  heads.firsts[1].resize(2);
  heads.firsts[3].clear();
  Planned plan(shape, heads);
  std::vector<std::vector<int>> begins;
  for (int id = 0; id < plan.counts.cut_parts; ++id) {
    const SlotPart& part = plan.cut[Heads::at(id)];
    if (part.unit_begin == 0) begins.emplace_back();
    begins.back().push_back(part.unit_begin);
  }
  ASSERT_EQ(begins.size(), 24U);
  EXPECT_EQ(begins[0], begins[1]);
  EXPECT_EQ(begins[0], begins[12]);
}

}  // namespace
}  // namespace flash_dmattn::cuda::sm90
