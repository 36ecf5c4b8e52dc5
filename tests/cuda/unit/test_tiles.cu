#include <cstdint>
#include <set>
#include <vector>

#include "cuda/primitives/tile_copy.cuh"
#include "cuda/sm80/tile/tile.cuh"
#include "unit.cuh"

// Tiles in shared memory: where elements lie, how operands are read from them, and copies to and from them.
namespace flash_dmattn::cuda::unit {
namespace {

using sm80::Major;
using sm80::Operand;
using sm80::SharedTile;

struct Tiles : CudaUnit {};

// ---- Swizzle ---------------------------------------------------------------------------------------

template <class Tile>
struct AllOffsets {
  std::uint32_t* offsets;  // [rows, chunks]

  __device__ void operator()(std::byte*) const {
    for (int i = static_cast<int>(threadIdx.x); i < Tile::rows * Tile::chunks; i += blockDim.x) {
      offsets[i] = Tile::offset(i / Tile::chunks, i % Tile::chunks);
    }
  }
};

// Every chunk has 16 bytes of its own within the tile, and the eight rows that a phase of ldmatrix reads at one
// chunk lie in all eight groups of four banks.
template <class Tile>
void expect_swizzle() {
  SCOPED_TRACE(std::to_string(Tile::rows) + "x" + std::to_string(Tile::columns));
  const DeviceArray<std::uint32_t> to(Tile::rows * Tile::chunks);
  run(1, 128, 0, AllOffsets<Tile>{to.data()});
  const std::vector<std::uint32_t> offsets = to.values();
  const std::set<std::uint32_t> distinct(offsets.begin(), offsets.end());
  EXPECT_EQ(distinct.size(), offsets.size());
  EXPECT_LT(*distinct.rbegin(), static_cast<std::uint32_t>(Tile::bytes));
  for (const std::uint32_t offset : offsets) ASSERT_EQ(offset % 16, 0u);
  for (int row = 0; row < Tile::rows; row += 8) {
    for (int chunk = 0; chunk < Tile::chunks; ++chunk) {
      std::set<std::uint32_t> banks;
      for (int r = row; r < row + 8; ++r) {
        banks.insert(offsets[static_cast<std::size_t>(r * Tile::chunks + chunk)] / 16 % 8);
      }
      ASSERT_EQ(banks.size(), 8u) << "rows from " << row << ", chunk " << chunk;
    }
  }
}

TEST_F(Tiles, SwizzleIsInvertibleAndFreeOfBankConflicts) {
  expect_swizzle<SharedTile<64, 32>>();
  expect_swizzle<SharedTile<64, 64>>();
  expect_swizzle<SharedTile<32, 128>>();
  expect_swizzle<SharedTile<128, 128>>();
  expect_swizzle<SharedTile<64, 256>>();
}

// ---- Operands of mma -------------------------------------------------------------------------------

template <class Tile>
__device__ std::uint16_t& element(std::byte* tile, int row, int column) {
  return *reinterpret_cast<std::uint16_t*>(tile + Tile::offset(row, column / 8) + column % 8 * 2);
}

// Every 16x16 block of an operand, as a warp loads it: [mn / 16][k / 16][lane][4].
template <class Tile, Major major, bool is_a>
struct LoadBlocks {
  std::uint32_t* blocks;

  __device__ void operator()(std::byte* shared) const {
    for (int i = lane_id(); i < Tile::rows * Tile::columns; i += warp_size) {
      element<Tile>(shared, i / Tile::columns, i % Tile::columns) = static_cast<std::uint16_t>(i);
    }
    __syncwarp();
    constexpr int mn_size = major == Major::k ? Tile::rows : Tile::columns;
    constexpr int k_size = major == Major::k ? Tile::columns : Tile::rows;
    const Operand<Tile, major, is_a> operand(shared_address(shared), 0);
    for (int mn = 0; mn < mn_size; mn += 16) {
      for (int k = 0; k < k_size; k += 16) {
        std::uint32_t block[4];
        operand.load(block, mn, k);
        for (int i = 0; i < 4; ++i) {
          blocks[((mn / 16 * (k_size / 16) + k / 16) * warp_size + lane_id()) * 4 + i] = block[i];
        }
      }
    }
  }
};

template <class Tile, Major major, bool is_a>
void expect_blocks() {
  SCOPED_TRACE(std::string(is_a ? "A" : "B") + (major == Major::k ? ", k" : ", mn") +
               " contiguous, " + std::to_string(Tile::columns) + " columns");
  constexpr int k_size = major == Major::k ? Tile::columns : Tile::rows;
  const DeviceArray<std::uint32_t> to(Tile::rows * Tile::columns / 2);
  run(1, 32, Tile::bytes, LoadBlocks<Tile, major, is_a>{to.data()});
  const std::vector<std::uint32_t> blocks = to.values();
  const auto expected = [](int mn, int k) {
    const int row = major == Major::k ? mn : k;
    const int column = major == Major::k ? k : mn;
    return static_cast<std::uint16_t>(row * Tile::columns + column);
  };
  for (std::size_t n = 0; n < blocks.size(); ++n) {
    const int i = static_cast<int>(n % 4);
    const int lane = static_cast<int>(n / 4 % 32);
    const int block = static_cast<int>(n / 128);
    // PTX, mma.m16n8k16: A is (m0 k0)(m8 k0)(m0 k8)(m8 k8); two neighbouring B are (n0 k0)(n0 k8)(n8 k0)(n8 k8).
    const int mn = block / (k_size / 16) * 16 + lane / 4 + 8 * (is_a ? i % 2 : i / 2);
    const int k = block % (k_size / 16) * 16 + lane % 4 * 2 + 8 * (is_a ? i / 2 : i % 2);
    ASSERT_EQ(blocks[n] & 0xffff, expected(mn, k)) << "(" << mn << ", " << k << ")";
    ASSERT_EQ(blocks[n] >> 16, expected(mn, k + 1)) << "(" << mn << ", " << k + 1 << ")";
  }
}

TEST_F(Tiles, OperandsMatchMmaLayout) {
  expect_blocks<SharedTile<64, 64>, Major::k, true>();
  expect_blocks<SharedTile<64, 64>, Major::k, false>();
  expect_blocks<SharedTile<64, 64>, Major::mn, true>();
  expect_blocks<SharedTile<64, 64>, Major::mn, false>();
  expect_blocks<SharedTile<32, 128>, Major::k, true>();
  expect_blocks<SharedTile<32, 128>, Major::mn, false>();
  expect_blocks<SharedTile<64, 32>, Major::k, false>();
}

// ---- Global to shared ------------------------------------------------------------------------------

constexpr int source_rows = 90;

// Rows index(0) ... index(size - 1) of a head by threads [first_thread, first_thread + Size) of the block.
template <class Tile, int Size>
struct CopyIn {
  InputRows rows;
  int head_dim;
  int size;
  int first_thread;
  std::uint16_t* result;  // the tile as [rows, columns]

  __device__ void operator()(std::byte* shared) const {
    for (int i = static_cast<int>(threadIdx.x); i < Tile::bytes / 4; i += blockDim.x) {
      reinterpret_cast<std::uint32_t*>(shared)[i] = 0xffffffffu;
    }
    __syncthreads();
    const int rank = static_cast<int>(threadIdx.x) - first_thread;
    if (rank >= 0 && rank < Size) {
      const ThreadGroup<Size> group{rank};
      const RowSource<Tile, ThreadGroup<Size>> source(group, rows, 1, 1, head_dim);
      copy_g2s(group, source, shared_address(shared), size,
               [&](int r) { return index(r < size ? r : 0); });
      cp_async_wait_all();
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < Tile::rows * Tile::columns; i += blockDim.x) {
      result[i] = element<Tile>(shared, i / Tile::columns, i % Tile::columns);
    }
  }

  static __host__ __device__ int index(int row) { return (row * 7 + 3) % source_rows; }
};

template <class Tile, int Size>
void expect_copied_in(int head_dim, int size, bool aligned) {
  SCOPED_TRACE(std::to_string(Tile::columns) + " columns, " + std::to_string(Size) + " threads, " +
               std::to_string(head_dim) + " dims, " + std::to_string(size) + " rows" +
               (aligned ? "" : ", unaligned"));
  // [2, rows, 2, head_dim] with gaps; what must not be read is 0xFFFF.
  const int row_step = 2 * head_dim + (aligned ? 8 : 3);
  const std::size_t count = static_cast<std::size_t>(2 * source_rows * row_step);
  std::vector<std::uint16_t> elements(count, 0xFFFF);
  const auto at = [&](int row, int d) {
    return static_cast<std::size_t>((source_rows + row) * row_step + head_dim + d);
  };
  for (int row = 0; row < source_rows; ++row) {
    for (int d = 0; d < head_dim; ++d)
      elements[at(row, d)] = static_cast<std::uint16_t>(row * 300 + d);
  }
  const DeviceArray<std::uint16_t> from(elements, aligned ? 0 : 2);
  const DeviceArray<std::uint16_t> to(Tile::rows * Tile::columns);
  const InputRows rows{.data = reinterpret_cast<const std::byte*>(from.data()),
                       .batch = 2L * source_rows * row_step,
                       .row = 2L * row_step,
                       .head = 2L * head_dim,
                       .aligned = aligned,
                       .row_step = 2 * row_step};
  using Copy = CopyIn<Tile, Size>;
  run(1, 2 * Size, Tile::bytes, Copy{rows, head_dim, size, Size, to.data()});
  const std::vector<std::uint16_t> tile = to.values();
  for (int row = 0; row < Tile::rows; ++row) {
    for (int column = 0; column < Tile::columns; ++column) {
      const bool exists = row < size && column < head_dim;
      ASSERT_EQ(tile[static_cast<std::size_t>(row * Tile::columns + column)],
                exists ? elements[at(Copy::index(row), column)] : 0)
          << "(" << row << ", " << column << ")";
    }
  }
}

template <class Tile, int Size>
void expect_all_copied_in(std::initializer_list<int> head_dims) {
  for (const int head_dim : head_dims) {
    for (const int size : {Tile::rows, Tile::rows - 1, 17, 1, 0}) {
      for (const bool aligned : {true, false}) {
        expect_copied_in<Tile, Size>(head_dim, size, aligned);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(Tiles, CopiedRowsAreZeroPastTheirEnds) {
  expect_all_copied_in<SharedTile<64, 64>, 128>({64, 40, 8});
  expect_all_copied_in<SharedTile<64, 64>, 32>({64, 24});  // fewer than 8 rows at once
  expect_all_copied_in<SharedTile<64, 128>, 256>({128, 80});
  expect_all_copied_in<SharedTile<32, 256>, 128>({256, 200});
}

// ---- Registers to shared to global -----------------------------------------------------------------

constexpr int out_rows = 70;

template <class Tile, int Size>
struct CopyOut {
  OutputRows rows;
  int head_dim;
  int begin, end;  // of the tile's rows
  int first;       // row of the head that is the tile's row 0

  __device__ void operator()(std::byte* shared) const {
    // Warp w has rows [16 w, 16 w + 16) of the tile.
    constexpr int n8 = Tile::columns / 8;
    const int lane = lane_id();
    float c[1][n8][4];
    for (int n = 0; n < n8; ++n) {
      for (int e = 0; e < 4; ++e) {
        const int row = 16 * warp_id() + lane / 4 + 8 * (e / 2);
        c[0][n][e] = static_cast<float>(row * Tile::columns + 8 * n + 2 * (lane % 4) + e % 2);
      }
    }
    copy_r2s<Tile>(c, shared_address(shared), 16 * warp_id(), 0, [](float x, float y, int, int) {
      return static_cast<std::uint32_t>(x) | static_cast<std::uint32_t>(y) << 16;
    });
    __syncthreads();
    copy_s2g<Tile>(ThreadGroup<Size>::of_block(), shared_address(shared), begin, end, first, rows,
                   1, 1, head_dim);
  }
};

template <class Tile>
void expect_copied_out(int head_dim, int begin, int end, int first, bool aligned) {
  SCOPED_TRACE(std::to_string(Tile::columns) + " columns, " + std::to_string(head_dim) +
               " dims, rows " + std::to_string(begin) + " to " + std::to_string(end) +
               (aligned ? "" : ", unaligned"));
  constexpr int threads = Tile::rows / 16 * 32;
  const int row_step = 2 * head_dim + (aligned ? 8 : 3);
  const DeviceArray<std::uint16_t> to(static_cast<std::size_t>(2 * out_rows * row_step),
                                      aligned ? 0 : 2);
  const OutputRows rows{.data = reinterpret_cast<std::byte*>(to.data()),
                        .batch = 2L * out_rows * row_step,
                        .row = 2L * row_step,
                        .head = 2L * head_dim,
                        .aligned = aligned,
                        .row_step = 2 * row_step};
  run(1, threads, Tile::bytes, CopyOut<Tile, threads>{rows, head_dim, begin, end, first});
  std::vector<std::uint16_t> expected(static_cast<std::size_t>(2 * out_rows * row_step), 0xFFFF);
  for (int row = begin; row < end; ++row) {
    for (int d = 0; d < head_dim; ++d) {
      expected[static_cast<std::size_t>((out_rows + first + row) * row_step + head_dim + d)] =
          static_cast<std::uint16_t>(row * Tile::columns + d);
    }
  }
  ASSERT_EQ(to.values(), expected);
}

TEST_F(Tiles, StoreWritesOnlyItsTile) {
  for (const bool aligned : {true, false}) {
    expect_copied_out<SharedTile<64, 64>>(64, 0, 64, 5, aligned);
    expect_copied_out<SharedTile<64, 64>>(40, 3, 50, 20, aligned);
    expect_copied_out<SharedTile<64, 128>>(128, 0, 64, 0, aligned);
    expect_copied_out<SharedTile<64, 128>>(72, 0, 1, 69, aligned);
    expect_copied_out<SharedTile<64, 256>>(256, 16, 64, 6, aligned);
    expect_copied_out<SharedTile<64, 64>>(64, 7, 7, 0, aligned);  // no row
  }
}

}  // namespace
}  // namespace flash_dmattn::cuda::unit
