#pragma once

#include "cuda/primitives/integers.h"
#include "cuda/primitives/warp.cuh"
#include "cuda/sm90/backward/params.h"

namespace flash_dmattn::cuda::sm90 {

// Stores zeros in dk and dv of keys that no query sees and that never have a slot. These are three of four keys of a
// selection, or 0.1 GB at 8 x 32768. One warp of each block stores them during the main loop, which leaves memory
// bandwidth unused, 32 keys at a time.
template <class Kernel>
struct UnseenKeys {
  const BackwardKernelParams& p;

  __device__ void clear() const {
    const Shape& shape = p.backward.shape;
    const int groups = ceil_div(shape.seqlen_k, warp_size);
    const int count = shape.batch * shape.heads_kv * groups;
#pragma unroll 1
    for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
      const int batch = i / groups / shape.heads_kv;
      const int kv_head = i / groups % shape.heads_kv;
      const int first = i % groups * warp_size;
      // Keys past the end are padded with keys that no query sees.
      const KeyInterval seen = p.info.ranges_of(batch, kv_head)[first + lane_id()];
      const bool unseen = first + lane_id() < shape.seqlen_k && seen.first >= seen.last;
#pragma unroll 1
      for (unsigned left = warp_ballot(unseen); left != 0; left &= left - 1)
        clear_rows(batch, kv_head, first + __ffs(static_cast<int>(left)) - 1);
    }
  }

 private:
  // Stores a row of dk and then a row of dv.
  __device__ void clear_rows(int batch, int kv_head, int key) const {
    constexpr int chunks = Kernel::head_dim / 8;
#pragma unroll
    for (int first = 0; first < 2 * chunks; first += warp_size) {
      const int item = first + lane_id();
      const int chunk = item % chunks;
      const OutputRows& to = item < chunks ? p.backward.dk : p.backward.dv;
      const Shape& shape = p.backward.shape;
      const int columns = item < chunks ? shape.head_dim : shape.value_dim;
      if (item >= 2 * chunks || chunk >= columns / 8 || to.data == nullptr) continue;
      *reinterpret_cast<uint4*>(to.data + batch * to.batch + key * to.row + kv_head * to.head +
                                chunk * 16) = {0, 0, 0, 0};
    }
  }
};

}  // namespace flash_dmattn::cuda::sm90
