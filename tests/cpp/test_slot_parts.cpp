#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/sm90/slots/parts.h"
#include "support/random.h"

// The division of chains of slots among blocks, as host and device compute it.
namespace flash_dmattn::cuda::sm90 {
namespace {

// The parts of each block, in the order in which the block computes them, without parts that have no units.
std::vector<std::vector<SlotPart>> parts_of(const SlotPartition& partition) {
  std::vector<std::vector<SlotPart>> result(static_cast<std::size_t>(partition.blocks));
  for (int block = 0; block < partition.blocks; ++block) {
    for (int number = 0;; ++number) {
      const SlotPart part = partition.part(block, number);
      if (part.chain < 0) break;
      if (part.unit_begin < part.unit_end) result[static_cast<std::size_t>(block)].push_back(part);
    }
  }
  return result;
}

// [chain][unit]
template <class Value>
using Units = std::vector<std::vector<Value>>;

Units<int> no_units(int chains, int units) {
  return {static_cast<std::size_t>(chains), std::vector<int>(static_cast<std::size_t>(units), 0)};
}

int& at(Units<int>& table, int chain, int unit) {
  return table[static_cast<std::size_t>(chain)][static_cast<std::size_t>(unit)];
}

void expect_every_unit_once(const SlotPartition& partition,
                            const std::vector<std::vector<SlotPart>>& parts) {
  Units<int> covered = no_units(partition.chains, partition.units);
  std::vector<int> ids(static_cast<std::size_t>(partition.cut_parts()), 0);
  for (const auto& block_parts : parts) {
    for (const SlotPart& part : block_parts) {
      for (int unit = part.unit_begin; unit < part.unit_end; ++unit) {
        ++at(covered, part.chain, unit);
        const SlotPart found = partition.part_of(part.chain, unit);
        ASSERT_EQ(found.id, part.id);
        ASSERT_EQ(found.unit_begin, part.unit_begin);
        ASSERT_EQ(found.unit_end, part.unit_end);
      }
      if (part.unit_begin == 0 && part.unit_end == partition.units) continue;
      ASSERT_LT(part.id, partition.cut_parts());
      ASSERT_EQ(ids[static_cast<std::size_t>(part.id)]++, 0);
    }
  }
  for (const auto& chain_counts : covered) {
    ASSERT_EQ(std::count(chain_counts.begin(), chain_counts.end(), 1), partition.units);
  }
}

// With deterministic sums, the `row_blocks` chains of a kv head add at every unit in the order of their positions. All
// blocks run at once. No block may wait for a part that has not begun and that belongs to the same block or to a waiting
// block.
void expect_progress(const SlotPartition& partition,
                     const std::vector<std::vector<SlotPart>>& parts, int row_blocks) {
  struct Block {
    std::size_t part = 0;
    int done = 0;  // units of the part
  };
  std::vector<Block> blocks(parts.size());
  Units<int> added = no_units(partition.chains / row_blocks, partition.units);
  for (bool progress = true; progress;) {
    progress = false;
    for (std::size_t b = 0; b < parts.size(); ++b) {
      while (blocks[b].part < parts[b].size()) {
        const SlotPart& part = parts[b][blocks[b].part];
        const int unit = part.unit_begin + blocks[b].done;
        int& count = at(added, part.chain / row_blocks, unit);
        if (count != partition.position(part, row_blocks)) break;
        ++count;
        progress = true;
        if (++blocks[b].done == part.unit_end - part.unit_begin) {
          blocks[b] = {.part = blocks[b].part + 1};
        }
      }
    }
  }
  for (const auto& head_counts : added) {
    ASSERT_EQ(std::count(head_counts.begin(), head_counts.end(), row_blocks), partition.units);
  }
}

// Expects that a block has one part of the divided pieces, and that the parts of all these pieces begin at equal units.
void expect_common_cuts(const SlotPartition& partition,
                        const std::vector<std::vector<SlotPart>>& parts) {
  std::vector<std::vector<int>> begins(static_cast<std::size_t>(partition.chains * partition.cuts));
  for (const auto& block_parts : parts) {
    int divided = 0;
    for (const SlotPart& part : block_parts) {
      if (part.piece < partition.whole) continue;
      begins[static_cast<std::size_t>(part.piece)].push_back(part.unit_begin %
                                                             partition.piece_units);
      ++divided;
    }
    ASSERT_LE(divided, 1);
  }
  const std::vector<int>& first = begins[static_cast<std::size_t>(partition.whole)];
  for (const std::vector<int>& piece_begins : begins) {
    const auto size = static_cast<std::ptrdiff_t>(piece_begins.size());
    // The last piece of a chain may be shorter than the first.
    ASSERT_LE(piece_begins.size(), first.size());
    ASSERT_EQ(piece_begins, std::vector(first.begin(), first.begin() + size));
  }
}

TEST(SlotPartition, RandomPartitionCoversEveryUnitOnceAndDoesNotDeadlock) {
  testing::Random random(1);
  for (int round = 0; round < 2000; ++round) {
    const int row_blocks = 1 + static_cast<int>(random.below(12));
    const int chains = row_blocks * (1 + static_cast<int>(random.below(20)));
    const int units = 1 + static_cast<int>(random.below(40));
    const int blocks = 1 + static_cast<int>(random.below(140));
    const bool common = random.below(2) == 0;
    SCOPED_TRACE(std::to_string(chains) + " chains, " + std::to_string(row_blocks) +
                 " a kv head, of " + std::to_string(units) + " units on " + std::to_string(blocks) +
                 " blocks" + (common ? ", common cuts" : ""));
    const SlotPartition partition(chains, units, blocks,
                                  common ? RestCuts::common : RestCuts::even);
    const auto parts = parts_of(partition);
    expect_every_unit_once(partition, parts);
    if (round % 8 == 0) expect_progress(partition, parts, row_blocks);
    if (common && partition.rest_units > 0) expect_common_cuts(partition, parts);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace flash_dmattn::cuda::sm90
