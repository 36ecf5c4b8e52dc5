#pragma once

#include "cuda/primitives/ptx.cuh"
#include "cuda/primitives/views.h"
#include "cuda/primitives/warp.cuh"

// Copies of rows between global memory (g), shared memory (s) and registers (r). A Tile has `rows` rows of
// `chunks` 16-byte chunks; a chunk is at offset(row, chunk), and rows a multiple of 8 apart have the same swizzle.
namespace flash_dmattn::cuda {

// The source row of each row of a tile.
struct InOrder {
  static __device__ constexpr int key(int row) { return row; }
};

// Orders in which a lane has Count neighbouring keys.
template <int Count>
struct LaneContiguous;

// Keys are columns of a fragment. A lane's columns 8 n + 2 (l % 4) + {0, 1} are eight neighbouring keys for each four
// n. Their packed masks are one byte, and their 16-bit biases are 16 bytes.
template <>
struct LaneContiguous<8> {
  static __device__ constexpr int key(int column) {
    const int n = column / 8;
    return n / 4 * 32 + column % 8 / 2 * 8 + n % 4 * 2 + column % 2;
  }
};

// Keys are rows of a fragment. A lane's rows 16 m + 8 h + l / 4 are four neighbouring keys in each 32 rows, in which
// row (m, h) is number 2 m + h.
template <>
struct LaneContiguous<4> {
  static __device__ constexpr int key(int row) { return row / 32 * 32 + row % 8 * 4 + row / 8 % 4; }
};

// The division of a tile's rows among a group of threads: a thread has one chunk of row row(rank) and of every
// `rows_at_once`-th row after it.
template <class Tile, class Group>
struct CopySteps {
  static constexpr int rows_at_once = Group::size / Tile::chunks;
  static constexpr int steps = Tile::rows / rows_at_once;

  static __device__ int row(Group group) { return group.rank / Tile::chunks; }
  static __device__ int chunk(Group group) { return group.rank % Tile::chunks; }

  // The address of the chunk of step i; `base` is the address of step 0. Rows a multiple of 8 apart have the same
  // swizzle.
  static __device__ std::uint32_t to(std::uint32_t tile, std::uint32_t base, Group group, int i) {
    const int r = i * rows_at_once;
    return rows_at_once % 8 == 0 ? base + static_cast<std::uint32_t>(r * Tile::row_bytes)
                                 : tile + Tile::offset(row(group) + r, chunk(group));
  }
};

// Loads 8 elements one by one.
__device__ inline uint4 load_unaligned_chunk(const void* from) {
  const auto* const elements = static_cast<const std::uint16_t*>(from);
  const auto two = [&](int i) {
    return elements[i] | static_cast<std::uint32_t>(elements[i + 1]) << 16;
  };
  return {two(0), two(2), two(4), two(6)};
}

// The rows of one head, for a thread that copies one chunk of each. Columns from head_dim on are zero.
template <class Tile, class Group>
struct RowSource {
  const std::byte* data;   // this thread's chunk of row 0
  std::int64_t row;        // bytes
  std::int64_t head_step;  // bytes
  int row_step;            // `row`, if aligned
  bool aligned;
  bool exists;      // the row has this chunk
  bool full_width;  // the row has every chunk

  __device__ RowSource(Group group, const InputRows& rows, int batch, int head, int head_dim)
      : data(rows.data + batch * rows.batch + head * rows.head +
             CopySteps<Tile, Group>::chunk(group) * 16),
        row(rows.row),
        head_step(rows.head),
        row_step(rows.row_step),
        aligned(rows.aligned),
        exists(CopySteps<Tile, Group>::chunk(group) < head_dim / 8),
        full_width(head_dim == Tile::columns) {}

  // The same chunk of the n-th head after this one.
  __device__ const std::byte* head_chunk(int n) const { return data + n * head_step; }
};

// Copies to row r of the tile row index(r) of the head that is head(r) after the source's head, or zeros unless
// exists(r). index(r) is a valid row for every r.
template <class Tile, class Group, class Exists, class Index, class Head>
__device__ inline void copy_g2s(Group group, const RowSource<Tile, Group>& source,
                                std::uint32_t tile, const Exists& exists, const Index& index,
                                const Head& head) {
  using Steps = CopySteps<Tile, Group>;
  const int row = Steps::row(group);
  const int chunk = Steps::chunk(group);
  if (source.aligned) {
    const std::uint32_t base = tile + Tile::offset(row, chunk);
#pragma unroll
    for (int i = 0; i < Steps::steps; ++i) {
      const int r = row + i * Steps::rows_at_once;
      const bool valid = source.exists && exists(r);
      const std::byte* const from =
          source.head_chunk(head(r)) + static_cast<std::int64_t>(index(r)) * source.row_step;
      cp_async_16(Steps::to(tile, base, group, i), valid ? from : source.data, valid);
    }
  } else {
#pragma unroll 1
    for (int r = row; r < Tile::rows; r += Steps::rows_at_once) {
      const bool valid = source.exists && exists(r);
      const std::byte* const from = source.head_chunk(head(r)) + index(r) * source.row;
      store_shared_16(tile + Tile::offset(r, chunk),
                      valid ? load_unaligned_chunk(from) : uint4{0, 0, 0, 0});
    }
  }
}

template <class Tile, class Group, class Exists, class Index>
__device__ inline void copy_g2s(Group group, const RowSource<Tile, Group>& source,
                                std::uint32_t tile, const Exists& exists, const Index& index) {
  copy_g2s(group, source, tile, exists, index, [](int) { return 0; });
}

// Copies the first `size` rows; the other rows become zero.
template <class Tile, class Group, class Index>
__device__ inline void copy_g2s(Group group, const RowSource<Tile, Group>& source,
                                std::uint32_t tile, int size, const Index& index) {
  copy_g2s(group, source, tile, [&](int r) { return r < size; }, index);
}

// Copies aligned neighbouring rows that all exist: row r of the tile becomes row first + Order::key(r). Each address is
// one multiply-add with constants.
template <class Order, class Tile, class Group>
__device__ inline void copy_g2s_consecutive(Group group, const RowSource<Tile, Group>& source,
                                            std::uint32_t tile, int first) {
  using Steps = CopySteps<Tile, Group>;
  const int row = first + Order::key(Steps::row(group));
  const std::byte* const from = source.data + static_cast<std::int64_t>(row) * source.row_step;
  const std::uint32_t base = tile + Tile::offset(Steps::row(group), Steps::chunk(group));
#pragma unroll
  for (int i = 0; i < Steps::steps; ++i) {
    // Order::key permutes bits, and the two terms have no bit in common.
    cp_async_16(Steps::to(tile, base, group, i), from + static_cast<std::int64_t>(source.row_step) *
                                                            Order::key(i * Steps::rows_at_once));
  }
}

// Copies aligned rows indices[r] of two tensors at once, so that an index is read once for both.
template <class Tile, class Group>
__device__ inline void copy_g2s_gathered(Group group, const RowSource<Tile, Group>& a,
                                         std::uint32_t a_tile, const RowSource<Tile, Group>& b,
                                         std::uint32_t b_tile, const int* indices) {
  using Steps = CopySteps<Tile, Group>;
  const std::uint32_t offset = Tile::offset(Steps::row(group), Steps::chunk(group));
  int index[Steps::steps];
#pragma unroll
  for (int i = 0; i < Steps::steps; ++i)
    index[i] = indices[Steps::row(group) + i * Steps::rows_at_once];
#pragma unroll
  for (int i = 0; i < Steps::steps; ++i) {
    cp_async_16(Steps::to(a_tile, a_tile + offset, group, i),
                a.data + static_cast<std::int64_t>(index[i]) * a.row_step);
  }
#pragma unroll
  for (int i = 0; i < Steps::steps; ++i) {
    cp_async_16(Steps::to(b_tile, b_tile + offset, group, i),
                b.data + static_cast<std::int64_t>(index[i]) * b.row_step);
  }
}

// Stores a 16x16 block of packed accumulators, in the layout of an A operand, to columns [column, column + 16) of rows
// row(0) ... row(15) of a tile.
template <class Tile, class Row>
__device__ inline void store_block(std::uint32_t tile, const Row& row, int column,
                                   const std::uint32_t (&block)[4]) {
  store_matrix_x4([&](int r, int c) { return tile + Tile::offset(row(r), column / 8 + c); }, block);
}

// Stores a warp's accumulators, packed by pack(x, y, m, h), to rows [warp_row, ..) and columns [warp_column, ..) of a
// tile. `Order` permutes the warp's rows.
template <class Tile, class Order = InOrder, int M16, int N8, class Pack>
__device__ inline void copy_r2s(const float (&c)[M16][N8][4], std::uint32_t tile, int warp_row,
                                int warp_column, const Pack& pack) {
#pragma unroll
  for (int m = 0; m < M16; ++m) {
#pragma unroll
    for (int n = 0; n < N8; n += 2) {
      std::uint32_t block[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&four)[4] = c[m][n + i / 2];
        block[i] = pack(four[2 * (i % 2)], four[2 * (i % 2) + 1], m, i % 2);
      }
      store_block<Tile>(
          tile, [&](int r) { return warp_row + Order::key(16 * m + r); }, warp_column + 8 * n,
          block);
    }
  }
}

// Stores 8 elements, one by one if they are unaligned.
__device__ inline void store_chunk(std::byte* to, const std::uint32_t (&words)[4], bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
    return;
  }
  auto* const elements = reinterpret_cast<std::uint16_t*>(to);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    elements[2 * w] = static_cast<std::uint16_t>(words[w]);
    elements[2 * w + 1] = static_cast<std::uint16_t>(words[w] >> 16);
  }
}

// Copies rows [begin, end) of a tile to destination(row), unless the destination is null.
template <class Tile, int Size, class Destination>
__device__ inline void copy_s2g(ThreadGroup<Size> group, std::uint32_t tile, int begin, int end,
                                bool aligned, int head_dim, const Destination& destination) {
  const int chunks = head_dim / 8;
  for (int i = group.rank; i < (end - begin) * Tile::chunks; i += Size) {
    const int row = begin + i / Tile::chunks;
    const int chunk = i % Tile::chunks;
    std::byte* const to = destination(row);
    if (chunk >= chunks || to == nullptr) continue;
    const uint4 value = load_shared_16(tile + Tile::offset(row, chunk));
    store_chunk(to + chunk * 16, {value.x, value.y, value.z, value.w}, aligned);
  }
}

// Copies from a tile whose row 0 is row `first` of the head.
template <class Tile, int Size>
__device__ inline void copy_s2g(ThreadGroup<Size> group, std::uint32_t tile, int begin, int end,
                                int first, const OutputRows& to, int batch, int head,
                                int head_dim) {
  std::byte* const data = to.data + batch * to.batch + head * to.head;
  copy_s2g<Tile>(group, tile, begin, end, to.aligned, head_dim,
                 [&](int row) { return data + (first + row) * to.row; });
}

}  // namespace flash_dmattn::cuda
