#pragma once

#include "cuda/attention/params.h"
#include "cuda/sm90/listed_keys.h"
#include "cuda/stages/postprocess.cuh"

// Copies operands and gradients around the backward's main loop.
namespace flash_dmattn::cuda::sm90 {

// Copies rows of a tensor that the TMA unit cannot read, of the keys of a list, or of gradients that need not be
// aligned. One thread copies 8 columns of a row.
struct CopyRows {
  InputRows from;
  OutputRows to;
  int seqlen;
  int heads;
  int batch;
  int head_dim;
  ListedKeys list = {};
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
    const long key = list.key(static_cast<int>(b), static_cast<int>(head), static_cast<int>(row));
    const auto changed = [&](std::uint32_t two) { return (two & kept_bits) ^ flipped_bits; };
    uint4 words{0, 0, 0, 0};
    if (key >= 0) {
      words = load_unaligned_chunk(from.data + b * from.batch + key * from.row + head * from.head +
                                   offset);
      words = {changed(words.x), changed(words.y), changed(words.z), changed(words.w)};
    }
    store_chunk(to.data + b * to.batch + row * to.row + head * to.head + offset,
                {words.x, words.y, words.z, words.w}, to.aligned);
  }
};

// Copies rows of a key list's problem to the rows of its keys, and zeros to all other rows. One thread copies 8 columns
// of a row.
struct ScatterRows {
  OutputRows from;
  OutputRows to;
  Shape shape;  // with all keys
  int head_dim;
  ListedKeys list;

  long items() const {
    return long{shape.batch} * shape.seqlen_k * shape.heads_kv * (head_dim / 8);
  }

  __device__ void operator()(long item) const {
    const int chunks = head_dim / 8;
    const long offset = item % chunks * 16;
    const long key = item / chunks / shape.heads_kv % shape.seqlen_k;
    const long head = item / chunks % shape.heads_kv;
    const long b = item / chunks / shape.heads_kv / shape.seqlen_k;
    const long position =
        list.position(static_cast<int>(b), static_cast<int>(head), static_cast<int>(key));
    uint4 words{0, 0, 0, 0};
    if (position >= 0) {
      words = *reinterpret_cast<const uint4*>(from.data + b * from.batch + position * from.row +
                                              head * from.head + offset);
    }
    store_chunk(to.data + b * to.batch + key * to.row + head * to.head + offset,
                {words.x, words.y, words.z, words.w}, to.aligned);
  }
};

// The same for the sums of a key bias, [B, heads, keys] with query or kv heads. One thread copies an element.
struct ScatterSums {
  const float* from;
  float* to;
  int batch;
  int heads;
  int group;  // heads that share a list
  int positions;
  int keys;
  ListedKeys list;

  long items() const { return long{batch} * heads * keys; }

  __device__ void operator()(long item) const {
    const auto key = static_cast<int>(item % keys);
    const auto head = static_cast<int>(item / keys % heads);
    const auto b = static_cast<int>(item / keys / heads);
    const int position = list.position(b, head / group, key);
    to[item] = position < 0 ? 0 : from[item / keys * positions + position];
  }
};

}  // namespace flash_dmattn::cuda::sm90
