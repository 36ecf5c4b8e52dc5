#pragma once

namespace flash_dmattn::cuda::sm90 {

// The block of neighbouring keys that is `number` in the order of a head's `blocks`. Runs of `run_blocks` blocks
// descend and ascend alternately, beginning with a descending run. With a `run_blocks` of 1 all blocks ascend.
constexpr int place_in_run(int number, int blocks, int run_blocks) {
  const int run = number / run_blocks;
  if (run % 2 != 0) return number;
  const int begin = run * run_blocks;
  const int end = begin + run_blocks < blocks ? begin + run_blocks : blocks;
  return begin + end - 1 - number;
}

}  // namespace flash_dmattn::cuda::sm90
