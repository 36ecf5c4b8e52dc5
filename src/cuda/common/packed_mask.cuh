#pragma once

#include "cuda/common/math.cuh"
#include "cuda/common/scheduler.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/params.h"

// A mask with a query dimension, read once and packed to a bit for each pair. Where keys are chosen by
// rank, the bits are those of the chosen pairs.
namespace flash_dmattn::cuda {

struct PackMaskParams {
  Broadcast mask;
  Broadcast key_rank;
  Broadcast rank_limit;
  PackedMask packed;
  int heads;  // of the packed mask
  int group;  // of them share a kv head
  int rows;
  int keys;
  bool aligned;  // every 16 keys of a row are one aligned word, and every 4 ranks
  bool causal;   // keys that are not visible anyway are not read
  int shift;     // query r is at key r + shift

  __host__ __device__ int row_tiles() const {
    return (rows + PackedMask::side - 1) / PackedMask::side;
  }

  // The first element of a matrix.
  __device__ std::int64_t begin(const Broadcast& b, int matrix) const {
    const int head = matrix % heads;
    const int kv_head = b.head_kv == 0 || group == 1 ? head : head / group;
    return matrix / heads * b.batch + head * b.head_q + kv_head * b.head_kv;
  }
};

// A block packs 64 rows x 1024 keys: a warp 4 rows, a lane two pieces of 16 keys of each. All its loads
// are on their way at once, which pays with 1 KB of a row (3.6 TB/s on an H200) and does not with
// half of that (1.1; 2.2 one after the other).
template <bool Ranked>
struct PackMaskKernel {
  using Params = PackMaskParams;
  static constexpr int warps = 16;
  static constexpr int threads = warps * 32;
  static constexpr int min_blocks = 2;
  static constexpr int side = PackedMask::side;
  static constexpr int warp_rows = side / warps;
  static constexpr int pieces = 2;
  static constexpr int piece_words = 8;
  static constexpr int block_words = pieces * piece_words;
  static constexpr int word_bytes = side * 8 + 16;  // 16: words lie in different banks

  struct SharedStorage {
    alignas(16) std::byte bits[block_words][word_bytes];
    std::uint8_t some[warps][block_words];
    std::uint8_t all[warps][block_words];
  };

  static std::int64_t blocks(const Params& p, std::int64_t matrices) {
    return matrices * p.row_tiles() * key_blocks(p);
  }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const int warp = warp_id();
    const int lane = lane_id();
    const int key_block = static_cast<int>(blockIdx.x) % key_blocks(p);
    const int row_block = static_cast<int>(blockIdx.x) / key_blocks(p);
    const int row_tile = row_block % p.row_tiles();
    const int matrix = row_block / p.row_tiles();
    // Nobody reads the bits of an empty tile unless its neighbour of an aligned pair is not empty.
    if (p.causal && key_block * block_words * side > (row_tile | 1) * side + side - 1 + p.shift) {
      store_state(p, row_block, key_block, 0);
      return;
    }
    const int first_row = row_tile * side + warp * warp_rows;
    const int rows = min(p.rows - first_row, warp_rows);
    const std::uint8_t* const from = reinterpret_cast<const std::uint8_t*>(p.mask.data) +
                                     p.begin(p.mask, matrix) + first_row * p.mask.query;
    int limits[warp_rows];  // of ranks
    if constexpr (Ranked) {
      const auto* const of_rows = reinterpret_cast<const std::int32_t*>(p.rank_limit.data) +
                                  p.begin(p.rank_limit, matrix) + first_row * p.rank_limit.query;
#pragma unroll
      for (int i = 0; i < warp_rows; ++i) {
        limits[i] = i < rows ? __ldg(of_rows + i * p.rank_limit.query) : 0;
      }
    }
    const auto chunk_of = [&](int j) { return (key_block * pieces + j) * 32 + lane; };  // 16 keys
    const auto seen = [&](int i, int j) {
      return i < rows && (!p.causal || chunk_of(j) * 16 <= first_row + i + p.shift);
    };
    const bool whole = p.aligned && (key_block + 1) * block_words * side <= p.keys;
    uint4 bytes[warp_rows][pieces];
    if (whole) {
#pragma unroll
      for (int i = 0; i < warp_rows; ++i) {
#pragma unroll
        for (int j = 0; j < pieces; ++j) {
          const auto* const chunk =
              reinterpret_cast<const uint4*>(from + i * p.mask.query + chunk_of(j) * 16);
          bytes[i][j] = seen(i, j) ? __ldg(chunk) : uint4{0, 0, 0, 0};
        }
      }
    }
#pragma unroll
    for (int j = 0; j < pieces; ++j) {
      // Keys that do not exist do not keep a tile from being full.
      const int existing = max(min(p.keys - chunk_of(j) * 16, 16), 0);
      const std::uint32_t missing = ~((1u << existing) - 1) & 0xffffu;
      int ranks[16];
      if constexpr (Ranked) load_ranks(p, matrix, chunk_of(j) * 16, existing, whole, ranks);
      std::uint32_t some = 0;
      std::uint32_t all = 0xffff;
#pragma unroll
      for (int i = 0; i < warp_rows; ++i) {
        std::uint32_t bits = 0;
        if (whole) {
          bits = bits_of(bytes[i][j]);
        } else if (seen(i, j)) {
          bits = load_bits(p, from + i * p.mask.query, chunk_of(j) * 16, existing);
        }
        if constexpr (Ranked) bits &= bits_below(ranks, limits[i]);
        some |= bits;
        if (i < rows) all &= bits | missing;
        std::byte* const to =
            &shared.bits[piece_words * j + lane / 4][(warp * warp_rows + i) * 8 + lane % 4 * 2];
        *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(bits);
      }
      const unsigned some_lanes = warp_ballot(some != 0);
      const unsigned all_lanes = warp_ballot(all == 0xffffu);
      if (lane < piece_words) {
        shared.some[warp][piece_words * j + lane] = (some_lanes >> (4 * lane) & 0xf) != 0;
        shared.all[warp][piece_words * j + lane] = (all_lanes >> (4 * lane) & 0xf) == 0xf;
      }
    }
    __syncthreads();
    const int first_word = key_block * block_words;
    if (first_word + warp < p.packed.words) {  // two rows of a word each
      auto* const tiles = reinterpret_cast<uint4*>(
          p.packed.bits +
          (static_cast<std::int64_t>(row_block) * p.packed.words + first_word) * side);
      tiles[threadIdx.x] = *reinterpret_cast<const uint4*>(&shared.bits[warp][lane * 16]);
    }
    const int mine = static_cast<int>(threadIdx.x);
    if (mine >= block_words) return;
    std::uint8_t any_row = 0;
    std::uint8_t every_row = 1;
    for (int w = 0; w < warps; ++w) {
      any_row |= shared.some[w][mine];
      every_row &= shared.all[w][mine];
    }
    store_state(p, row_block, key_block,
                (any_row != 0 ? PackedMask::some : 0) | (every_row != 0 ? PackedMask::all : 0));
  }

 private:
  static __host__ __device__ int key_blocks(const Params& p) {
    return (p.packed.words + block_words - 1) / block_words;
  }

  // The state of word threadIdx.x of a block.
  static __device__ void store_state(const Params& p, int row_block, int key_block, int state) {
    const int mine = static_cast<int>(threadIdx.x);
    const int word = key_block * block_words + mine;
    if (mine < block_words && word < p.packed.words) {
      p.packed.states[static_cast<std::int64_t>(row_block) * p.packed.words + word] =
          static_cast<std::uint8_t>(state);
    }
  }

  // The keys that are not 0, a bit for each.
  static __device__ std::uint32_t bits_of(uint4 bytes) {
    const auto gather = [](std::uint32_t four) {
      // Multiplying moves the bit of byte i to 28 + i.
      const std::uint32_t set = mark_nonzero_bytes(four) & 0x80808080u;
      return set * 0x00204081u >> 28;
    };
    return gather(bytes.x) | gather(bytes.y) << 4 | gather(bytes.z) << 8 | gather(bytes.w) << 12;
  }

  // Of keys [key, key + existing); the bits of the others are not set anyway.
  static __device__ void load_ranks(const Params& p, int matrix, int key, int existing, bool whole,
                                    int (&ranks)[16]) {
    const auto* const from =
        reinterpret_cast<const std::int32_t*>(p.key_rank.data) + p.begin(p.key_rank, matrix) + key;
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      if (whole) {
        const int4 four = __ldg(reinterpret_cast<const int4*>(from + i));
        ranks[i] = four.x;
        ranks[i + 1] = four.y;
        ranks[i + 2] = four.z;
        ranks[i + 3] = four.w;
      } else {
#pragma unroll
        for (int e = i; e < i + 4; ++e) ranks[e] = e < existing ? __ldg(from + e) : 0;
      }
    }
  }

  static __device__ std::uint32_t bits_below(const int (&ranks)[16], int limit) {
    std::uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) bits |= (ranks[i] < limit ? 1u : 0u) << i;
    return bits;
  }

  // The keys of [key, key + existing) of a row that are not 0.
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
