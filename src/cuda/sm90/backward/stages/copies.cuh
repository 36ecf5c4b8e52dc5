#pragma once

#include "cuda/attention/params.h"
#include "cuda/stages/postprocess.cuh"

// Copies operands and gradients around the backward's main loop.
namespace flash_dmattn::cuda::sm90 {

// Copies rows of a tensor that the TMA unit cannot read, or of gradients that need not be aligned. One thread copies 8
// columns of a row.
struct CopyRows {
  InputRows from;
  OutputRows to;
  int seqlen;
  int heads;
  int batch;
  int head_dim;
  // For every two elements, the bits that are kept and then the bits that are flipped, which can flip the signs or
  // clear all bits.
  std::uint32_t kept_bits = 0xffffffff;
  std::uint32_t flipped_bits = 0;

  long items() const { return long{batch} * seqlen * heads * (head_dim / 8); }

  __device__ void operator()(long item) const {
    const int chunks = head_dim / 8;
    const long offset = item % chunks * 16;
    const long row = item / chunks / heads % seqlen;
    const long head = item / chunks % heads;
    const long b = item / chunks / heads / seqlen;
    const auto changed = [&](std::uint32_t two) { return (two & kept_bits) ^ flipped_bits; };
    const uint4 words = load_unaligned_chunk(from.data + b * from.batch + row * from.row +
                                             head * from.head + offset);
    store_chunk(to.data + b * to.batch + row * to.row + head * to.head + offset,
                {changed(words.x), changed(words.y), changed(words.z), changed(words.w)},
                to.aligned);
  }
};

}  // namespace flash_dmattn::cuda::sm90
