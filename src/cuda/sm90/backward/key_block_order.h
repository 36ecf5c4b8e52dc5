#pragma once

#include <algorithm>

#include "cuda/primitives/integers.h"

namespace flash_dmattn::cuda::sm90 {

// The order of blocks of neighbouring keys: the number of kv heads of a section (KeyTile), and of blocks of a run of a
// head. The runs of a head descend and ascend alternately; with runs of 1 all blocks ascend.
struct KeyBlockOrder {
  int section_heads = 1;
  int run_blocks = 1;

  bool operator==(const KeyBlockOrder&) const = default;
};

// The facts that the order of a backward's blocks follows from.
struct KeyBlockOrderTraits {
  int heads;               // kv heads of all batch elements
  int heads_of_l2;         // KeyTile::heads_of_l2
  int group;               // query heads of a kv head
  int works;               // works of a kv head
  int at_once;             // works that the GPU computes at the same time
  bool consecutive;        // windows and documents, which read few queries
  bool ordered;            // blocks add to dq in a fixed order
  bool dense;              // there is a dense mask or bias
  bool causal_from_start;  // causal with at least as many queries as keys
};

// All heads are one section for windows and documents (the shorter blocks of a document run last). They are also one
// section for blocks that add to dq in a fixed order, because these wait for each other, with the exceptions below.
// Under causality a head's blocks end at the same query, and of two neighbours the block with later keys begins two
// tiles later. Two blocks that start together in descending order are therefore two tiles apart, and neither waits.
// - The blocks of a head that are in flight form a run, and the longest runs come first. The blocks of a run start
//   when the blocks of the previous run end, two tiles apart. In another descending run their distance would grow to
//   four tiles, so the run ascends. With several query heads per kv head, the distance grows by two tiles for each;
//   the L2 has room for two heads.
// - Fewer heads per section give longer runs and less DRAM traffic, as a run reads q, dout and dq from DRAM once. But
//   in an ascending run every block first lags the previous block by one tile, so a section has many runs.
// - With many short heads in one section, each would have few blocks in flight. Such heads form sections of the L2,
//   each of which descends as a whole. With fewer heads, the longest blocks of the last section, which run last, cost
//   more.
constexpr KeyBlockOrder key_block_order(const KeyBlockOrderTraits& t) {
  constexpr int section_rounds = 16;  // rounds of blocks on all multiprocessors
  constexpr int many_heads = 32;
  if (!t.ordered && !t.consecutive) return {.section_heads = t.heads_of_l2};
  if (t.consecutive || t.dense) return {.section_heads = t.heads};
  const int most_heads = std::max(section_rounds * t.at_once / t.works, 1);
  if (t.causal_from_start && t.group <= 2 && std::min(t.heads, most_heads) < many_heads) {
    const int section_heads = ceil_div(t.heads, ceil_div(t.heads, most_heads));
    return {section_heads, std::max(t.at_once / section_heads, 1)};
  }
  if (t.group == 1 && t.heads >= many_heads) return {t.heads_of_l2, t.works};
  return {.section_heads = t.heads};
}

}  // namespace flash_dmattn::cuda::sm90
