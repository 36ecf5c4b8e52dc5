#pragma once

namespace flash_dmattn::cuda {

// The memory of blocks that add in a fixed order (semaphore.cuh). Null pointers mean any order.
struct OrderSemaphores {
  int* started = nullptr;     // [1] number of blocks that have started
  int* published = nullptr;   // [blocks] the order index up to which each block is done
  bool across_heads = false;  // blocks of other kv heads add to a query's elements too
};

}  // namespace flash_dmattn::cuda
