#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/scheduler.cuh"
#include "cuda/primitives/integers.h"
#include "cuda/primitives/math.cuh"
#include "cuda/primitives/warp.cuh"

// Reads a dense mask once and packs it to a bit for each element.
namespace flash_dmattn::cuda {

struct PackMaskParams {
  Broadcast mask;
  PackedMask packed;
  int matrices;
  int heads;  // heads of the packed mask
  int group;  // heads of the packed mask that share a kv head
  int rows;
  int keys;
  bool aligned;  // every 16 keys of a row are one aligned word
  bool causal;   // elements that causality hides are not read
  int shift;     // query r is at key r + shift

  __host__ __device__ int row_tiles() const { return ceil_div(rows, PackedMask::side); }

  // The first element of a matrix.
  __device__ std::int64_t begin(const Broadcast& b, int matrix) const {
    const int head = matrix % heads;
    const int kv_head = b.head_kv == 0 || group == 1 ? head : head / group;
    return matrix / heads * b.batch + head * b.head_q + kv_head * b.head_kv;
  }
};

// A block packs 64 rows x 1024 keys; a warp has 8 rows, and a lane two chunks of 16 keys of each row. All loads of a
// lane are in flight at once. On an H200 this reads 3.6 TB/s with 1 KB of a row, and 1.1 TB/s with half of that (2.2 if
// the loads are issued one after the other). The bytes are read once, so they are loaded evict-first, which keeps the
// written bits in the L2 and gains 5 to 9 %. 16 warps in two blocks of a multiprocessor are 7 to 9 % slower, and 2 KB
// of a row are 25 % slower.
struct PackMaskKernel {
  using Params = PackMaskParams;
  static constexpr int warps = 8;
  static constexpr int threads = warps * warp_size;
  static constexpr int min_blocks = 3;
  static constexpr int side = PackedMask::side;
  static constexpr int warp_rows = side / warps;
  static constexpr int chunk_keys = 16;
  static constexpr int chunks = 2;
  static constexpr int warp_words = 8;  // words of one chunk of every lane of a warp
  static constexpr int block_words = chunks * warp_words;
  static constexpr int block_keys = block_words * side;
  static constexpr int word_bytes = side * 8 + 16;  // padding of 16 puts words in different banks

  struct SharedStorage {
    alignas(16) std::byte bits[block_words][word_bytes];
    std::uint8_t some[warps][block_words];
    std::uint8_t all[warps][block_words];
  };

  static long blocks(const Params& p) { return long{p.matrices} * p.row_tiles() * key_blocks(p); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    pack(p, static_cast<int>(blockIdx.x), shared);
  }

  // Does the work of block `index` of `blocks`, with all threads of a block.
  static __device__ void pack(const Params& p, int index, SharedStorage& shared) {
    const Block block(p, index);
    // The bits of an empty tile are read only if another row tile of the work tile is not empty.
    if (p.causal &&
        block.key > (block.row_tile + PackedMask::shared_row_tiles) * side - 1 + p.shift) {
      store_state(p, block, 0);
      return;
    }
    const WarpRows rows(p, block);
    uint4 bytes[warp_rows][chunks];
    if (block.full) load_bytes(p, block, rows, bytes);
#pragma unroll
    for (int j = 0; j < chunks; ++j) pack_chunk(p, block, rows, j, bytes, shared);
    __syncthreads();
    store_words(p, block, shared);
    if (threadIdx.x < block_words) store_state(p, block, merge_rows(shared));
  }

 private:
  struct Block {
    int row_block;  // counts the row tiles of all matrices
    int row_tile;
    int matrix;
    int key;    // first key
    bool full;  // all keys of the block exist and are aligned

    __device__ Block(const Params& p, int index)
        : row_block(index / key_blocks(p)),
          row_tile(row_block % p.row_tiles()),
          matrix(row_block / p.row_tiles()),
          key(index % key_blocks(p) * block_keys),
          full(p.aligned && key + block_keys <= p.keys) {}

    // The first key of the lane's chunk j.
    __device__ int key_of(int j) const { return key + (j * warp_size + lane_id()) * chunk_keys; }
  };

  struct WarpRows {
    int first;
    int count;  // rows that exist
    const std::uint8_t* bytes;

    __device__ WarpRows(const Params& p, const Block& block)
        : first(block.row_tile * side + warp_id() * warp_rows),
          count(min(p.rows - first, warp_rows)),
          bytes(reinterpret_cast<const std::uint8_t*>(p.mask.data) + p.begin(p.mask, block.matrix) +
                first * p.mask.query) {}

    // Whether row i sees any key from `key` on, regardless of the mask.
    __device__ bool sees(const Params& p, int i, int key) const {
      return i < count && (!p.causal || key <= first + i + p.shift);
    }
  };

  static __host__ __device__ int key_blocks(const Params& p) {
    return ceil_div(p.packed.words, block_words);
  }

  static __device__ void load_bytes(const Params& p, const Block& block, const WarpRows& rows,
                                    uint4 (&bytes)[warp_rows][chunks]) {
#pragma unroll
    for (int i = 0; i < warp_rows; ++i) {
#pragma unroll
      for (int j = 0; j < chunks; ++j) {
        const int key = block.key_of(j);
        const auto* const from =
            reinterpret_cast<const uint4*>(rows.bytes + i * p.mask.query + key);
        bytes[i][j] = rows.sees(p, i, key) ? __ldcs(from) : uint4{0, 0, 0, 0};
      }
    }
  }

  // Packs the bits of the lane's chunk j, and finds which words of the warp's chunks j have some or all bits set.
  static __device__ void pack_chunk(const Params& p, const Block& block, const WarpRows& rows,
                                    int j, const uint4 (&bytes)[warp_rows][chunks],
                                    SharedStorage& shared) {
    const int key = block.key_of(j);
    const int existing = max(min(p.keys - key, chunk_keys), 0);
    // A tile may be full even if some of its keys do not exist.
    const std::uint32_t missing = ~((1u << existing) - 1) & 0xffffu;
    std::uint32_t some = 0;
    std::uint32_t all = 0xffff;
#pragma unroll
    for (int i = 0; i < warp_rows; ++i) {
      std::uint32_t bits = 0;
      if (block.full) {
        bits = bits_of(bytes[i][j]);
      } else if (rows.sees(p, i, key)) {
        bits = load_bits(p, rows.bytes + i * p.mask.query, key, existing);
      }
      some |= bits;
      if (i < rows.count) all &= bits | missing;
      std::byte* const to = &shared.bits[warp_words * j + lane_id() / 4]
                                        [(warp_id() * warp_rows + i) * 8 + lane_id() % 4 * 2];
      *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(bits);
    }
    const unsigned some_lanes = warp_ballot(some != 0);
    const unsigned full_lanes = warp_ballot(all == 0xffffu);
    const int word = lane_id();  // four lanes have the keys of a word
    if (word < warp_words) {
      shared.some[warp_id()][warp_words * j + word] = (some_lanes >> (4 * word) & 0xf) != 0;
      shared.all[warp_id()][warp_words * j + word] = (full_lanes >> (4 * word) & 0xf) == 0xf;
    }
  }

  // Stores words of all rows; a lane stores two rows.
  static __device__ void store_words(const Params& p, const Block& block,
                                     const SharedStorage& shared) {
    const int first = block.key / side;
    const int existing = min(p.packed.words - first, block_words);
    auto* const tiles = reinterpret_cast<uint4*>(
        p.packed.bits +
        (static_cast<std::int64_t>(block.row_block) * p.packed.words + first) * side);
#pragma unroll
    for (int word = warp_id(); word < existing; word += warps) {
      tiles[word * warp_size + lane_id()] =
          *reinterpret_cast<const uint4*>(&shared.bits[word][lane_id() * 16]);
    }
  }

  // Merges the state of word threadIdx.x over all rows.
  static __device__ int merge_rows(const SharedStorage& shared) {
    std::uint8_t some = 0;
    std::uint8_t all = 1;
    for (int w = 0; w < warps; ++w) {
      some |= shared.some[w][threadIdx.x];
      all &= shared.all[w][threadIdx.x];
    }
    return (some != 0 ? PackedMask::some : 0) | (all != 0 ? PackedMask::all : 0);
  }

  // Stores the state of word threadIdx.x.
  static __device__ void store_state(const Params& p, const Block& block, int state) {
    const int word = block.key / side + static_cast<int>(threadIdx.x);
    if (threadIdx.x < block_words && word < p.packed.words) {
      p.packed.states[static_cast<std::int64_t>(block.row_block) * p.packed.words + word] =
          static_cast<std::uint8_t>(state);
    }
  }

  // A bit for each key, set if its byte is not 0.
  static __device__ std::uint32_t bits_of(uint4 bytes) {
    const auto gather = [](std::uint32_t four) {
      // Multiplying moves the bit of byte i to 28 + i.
      const std::uint32_t set = mark_nonzero_bytes(four) & 0x80808080u;
      return set * 0x00204081u >> 28;
    };
    return gather(bytes.x) | gather(bytes.y) << 4 | gather(bytes.z) << 8 | gather(bytes.w) << 12;
  }

  // The bits of keys [key, key + existing) of a row.
  static __device__ std::uint32_t load_bits(const Params& p, const std::uint8_t* row, int key,
                                            int existing) {
    std::uint32_t bits = 0;
#pragma unroll 1
    for (int i = 0; i < existing; ++i) {
      bits |= (row[(key + i) * p.mask.key] != 0 ? 1u : 0u) << i;
    }
    return bits;
  }
};

}  // namespace flash_dmattn::cuda
