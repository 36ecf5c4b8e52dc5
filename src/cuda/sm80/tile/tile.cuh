#pragma once

#include "cuda/primitives/ptx.cuh"
#include "cuda/primitives/warp.cuh"
#include "cuda/sm80/tile/fragment.cuh"

// Tiles of 16-bit elements in shared memory, and their products by one warp.
namespace flash_dmattn::cuda::sm80 {

// The storage of a component that needs none.
struct NoStorage {};

// The buffer of tile n among Count buffers.
template <int Count>
__device__ inline int ring(int n) {
  return static_cast<int>(static_cast<unsigned>(n) % Count);
}

// A tile [Rows][Columns]. A row consists of 16-byte chunks of 8 elements, stored at chunk ^ swizzle(row), so that the 8
// rows that ldmatrix reads at one chunk column are in 8 different bank groups. The base address is aligned to 1024
// bytes.
template <int Rows, int Columns>
struct SharedTile {
  static constexpr int rows = Rows;
  static constexpr int columns = Columns;
  static constexpr int chunks = Columns / 8;
  static constexpr int row_bytes = Columns * 2;
  static constexpr int bytes = Rows * row_bytes;
  static_assert(chunks >= 4 && (chunks & (chunks - 1)) == 0);

  static __device__ int swizzle(int row) { return chunks >= 8 ? row & 7 : (row >> 1) & 3; }

  static __device__ std::uint32_t offset(int row, int chunk) {
    return static_cast<std::uint32_t>(row * row_bytes + ((chunk ^ swizzle(row)) << 4));
  }
};

// The dimension of an operand that is contiguous in shared memory.
enum class Major { k, mn };

// A warp's part of an operand: 16x16 blocks of A (m x k) or of B (n x k) from a tile that is stored [mn][k] (Major::k)
// or [k][mn] (Major::mn). `mn`, the first row or column of the part, is a multiple of the part's size, a power of two.
// Its bits and the bits of the offsets below are then disjoint, so that a block's address is the lane's base, one
// exclusive or and an immediate.
template <class Tile, Major kMajor, bool kIsA>
class Operand {
 public:
  __device__ Operand(std::uint32_t tile, int mn) {
    const int lane = lane_id();
    const int r = lane % 8;
    const int low = (lane / 8) % 2;
    const int high = lane / 16;
    // The order in which mma takes the four 8x8 matrices of a block: A (m0 k0)(m8 k0)(m0 k8)(m8 k8),
    // B (n0 k0)(n0 k8)(n8 k0)(n8 k8).
    const int second_mn = kIsA ? low : high;
    const int second_k = kIsA ? high : low;
    if constexpr (kMajor == Major::k) {
      base_ = tile + Tile::offset(mn + r + 8 * second_mn, second_k);
    } else {
      base_ = tile + Tile::offset(r + 8 * second_k, mn / 8 + second_mn);
    }
  }

  // Loads the block at (mn, k) of the part; both are multiples of 16.
  __device__ void load(std::uint32_t (&block)[4], int mn, int k) const {
    const int row = kMajor == Major::k ? mn : k;
    const int column = kMajor == Major::k ? k : mn;
    const std::uint32_t address = (base_ ^ static_cast<std::uint32_t>(column * 2)) +
                                  static_cast<std::uint32_t>(row * Tile::row_bytes);
    if constexpr (kMajor == Major::k) {
      ldmatrix_x4(block, address);
    } else {
      ldmatrix_x4_trans(block, address);
    }
  }

 private:
  std::uint32_t base_;
};

template <class Tile, Major kMajor>
using OperandA = Operand<Tile, kMajor, true>;
template <class Tile, Major kMajor>
using OperandB = Operand<Tile, kMajor, false>;

// Adds A B^T over k in [0, K) to blocks [Begin, End) of c's columns. The blocks of B for the next `Ahead` steps and the
// blocks of A for the next k are loaded while the blocks of this step are multiplied.
template <class T, int K, int Begin, int End, int Ahead, int M16, int N8, class A, class B>
__device__ inline void multiply_columns(float (&c)[M16][N8][4], const A& a, const B& b) {
  constexpr int columns = (End - Begin) / 2;
  constexpr int steps = K / 16 * columns;
  std::uint32_t left[2][M16][4];
  std::uint32_t right[Ahead + 1][4];
  const auto load_right = [&](int step) {
    b.load(right[step % (Ahead + 1)], step % columns * 16, step / columns * 16);
  };
#pragma unroll
  for (int m = 0; m < M16; ++m) a.load(left[0][m], m * 16, 0);
#pragma unroll
  for (int step = 0; step < Ahead; ++step) load_right(step);
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    const int k = step / columns;
    const int n = step % columns;
    if (step + Ahead < steps) load_right(step + Ahead);
    if (n == columns - 1 && step + 1 < steps) {
#pragma unroll
      for (int m = 0; m < M16; ++m) a.load(left[(k + 1) % 2][m], m * 16, (k + 1) * 16);
    }
    const std::uint32_t (&block)[4] = right[step % (Ahead + 1)];
#pragma unroll
    for (int m = 0; m < M16; ++m) {
      mma_m16n8k16<T>(c[m][Begin + 2 * n], left[k % 2][m], block[0], block[1]);
      mma_m16n8k16<T>(c[m][Begin + 2 * n + 1], left[k % 2][m], block[2], block[3]);
    }
  }
}

// c += A B^T over k in [0, K).
template <class T, int K, int Ahead = 1, int M16, int N8, class A, class B>
__device__ inline void multiply(float (&c)[M16][N8][4], const A& a, const B& b) {
  multiply_columns<T, K, 0, N8, Ahead>(c, a, b);
}

// c += A B^T with A in registers. The accumulator layout of two n8 blocks is the operand layout of one k16 block, so that
// probabilities are multiplied in the registers that hold them.
template <class T, int K, int M16, int N8, class B>
__device__ inline void multiply(float (&c)[M16][N8][4], const std::uint32_t (&a)[M16][K / 16][4],
                                const B& b) {
  constexpr int columns = N8 / 2;
  constexpr int steps = K / 16 * columns;
  std::uint32_t right[2][4];
  b.load(right[0], 0, 0);
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    const int k = step / columns;
    const int n = step % columns;
    if (step + 1 < steps)
      b.load(right[(step + 1) % 2], (step + 1) % columns * 16, (step + 1) / columns * 16);
#pragma unroll
    for (int m = 0; m < M16; ++m) {
      mma_m16n8k16<T>(c[m][2 * n], a[m][k], right[step % 2][0], right[step % 2][1]);
      mma_m16n8k16<T>(c[m][2 * n + 1], a[m][k], right[step % 2][2], right[step % 2][3]);
    }
  }
}

}  // namespace flash_dmattn::cuda::sm80
