#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

// Products of a warpgroup: D[64, N] += A[64, 16] B[16, N], D in registers, B in shared memory. They run
// beside the threads; a batch is fenced, issued, committed and waited for.
//
// A thread's accumulators d[4 i + e] are row lane / 4 + 8 (e / 2) of its warp's 16, column 8 i +
// 2 (lane % 4) + e % 2: packed to 16 bits, those of 16 columns are A's registers of the next product.
namespace flash_dmattn::cuda::sm90 {

// ---- Order -----------------------------------------------------------------------------------------

// Registers that a product reads are written before it. Every batch takes a fence of its own: where one
// stands for two batches ptxas adds the other itself, and serializes them (C7520).
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most Batches committed ones are under way.
template <int Batches>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Batches) : "memory");
}

// No read of d moves to before this point: after a wait.
template <int N>
__device__ inline void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- Operands in shared memory ---------------------------------------------------------------------
//
// Tiles of rows are kept in panels of 64 columns: 128 bytes a row, 16-byte chunks swizzled by the row's
// lowest three bits (the TMA unit's SWIZZLE_128B), panels at multiples of 1024 bytes. A descriptor counts
// in 16 bytes.

inline constexpr int panel_columns = 64;
inline constexpr int panel_row_bytes = 128;

__device__ inline std::uint64_t swizzled_descriptor(std::uint32_t address,
                                                    std::uint32_t leading_bytes) {
  constexpr std::uint64_t swizzle_128 = 1;
  constexpr std::uint64_t eight_rows = 8 * panel_row_bytes;
  return swizzle_128 << 62 | eight_rows >> 4 << 32 |
         static_cast<std::uint64_t>(leading_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// An operand of Rows rows whose columns are summed over, at 16 columns a step.
template <int Rows>
struct KMajorOperand {
  std::uint64_t descriptor;

  __device__ explicit KMajorOperand(std::uint32_t address)
      : descriptor(swizzled_descriptor(address, 16)) {}

  __device__ std::uint64_t at(int step) const {
    constexpr int panel_steps = panel_columns / 16;
    return descriptor +
           static_cast<std::uint64_t>(step / panel_steps) * (Rows * panel_row_bytes >> 4) +
           static_cast<std::uint64_t>(step % panel_steps) * 2;
  }
};

// An operand of Rows rows that are summed over, at 16 rows a step.
template <int Rows>
struct RowMajorOperand {
  std::uint64_t descriptor;

  __device__ explicit RowMajorOperand(std::uint32_t address)
      : descriptor(swizzled_descriptor(address, Rows * panel_row_bytes)) {}

  __device__ std::uint64_t at(int step) const {
    return descriptor + static_cast<std::uint64_t>(step) * (16 * panel_row_bytes >> 4);
  }
};

// ---- Products --------------------------------------------------------------------------------------

// Lists of an instruction's 32 or 64 accumulators: inline assembly has no other way to name them.
#define WGMMA_NAMES_32                                                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_64                                                                           \
  WGMMA_NAMES_32                                                                                 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_FLOATS_8(i)                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_FLOATS_32 WGMMA_FLOATS_8(0), WGMMA_FLOATS_8(8), WGMMA_FLOATS_8(16), WGMMA_FLOATS_8(24)
#define WGMMA_FLOATS_64 \
  WGMMA_FLOATS_32, WGMMA_FLOATS_8(32), WGMMA_FLOATS_8(40), WGMMA_FLOATS_8(48), WGMMA_FLOATS_8(56)

// A and B from shared memory, both K-major. A, B: operand numbers; ADD: whether d is added to.
#define WGMMA_SS(SHAPE, TYPE, NAMES, FLOATS, A, B, ADD)                                     \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD                                \
               ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " {" NAMES \
               "}, %" #A ", %" #B ", add, 1, 1, 0, 0;\n}"                                   \
               : FLOATS                                                                     \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))

// A from registers, B row-major; added.
#define WGMMA_RS(SHAPE, TYPE, NAMES, FLOATS, A0, A1, A2, A3, B)                                  \
  asm volatile("{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\nwgmma.mma_async.sync.aligned." SHAPE \
               ".f32." TYPE "." TYPE " {" NAMES "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3        \
               "}, %" #B ", add, 1, 1, 1;\n}"                                                    \
               : FLOATS                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d = a b^T, or d += a b^T.
template <class T>
__device__ inline void wgmma(float (&d)[64], std::uint64_t a, std::uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    WGMMA_SS("m64n128k16", "bf16", WGMMA_NAMES_64, WGMMA_FLOATS_64, 64, 65, 66);
  } else {
    WGMMA_SS("m64n128k16", "f16", WGMMA_NAMES_64, WGMMA_FLOATS_64, 64, 65, 66);
  }
}

// d += a b.
template <class T>
__device__ inline void wgmma(float (&d)[64], const std::uint32_t* a, std::uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    WGMMA_RS("m64n128k16", "bf16", WGMMA_NAMES_64, WGMMA_FLOATS_64, 64, 65, 66, 67, 68);
  } else {
    WGMMA_RS("m64n128k16", "f16", WGMMA_NAMES_64, WGMMA_FLOATS_64, 64, 65, 66, 67, 68);
  }
}

template <class T>
__device__ inline void wgmma(float (&d)[32], const std::uint32_t* a, std::uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    WGMMA_RS("m64n64k16", "bf16", WGMMA_NAMES_32, WGMMA_FLOATS_32, 32, 33, 34, 35, 36);
  } else {
    WGMMA_RS("m64n64k16", "f16", WGMMA_NAMES_32, WGMMA_FLOATS_32, 32, 33, 34, 35, 36);
  }
}

#undef WGMMA_RS
#undef WGMMA_SS
#undef WGMMA_FLOATS_64
#undef WGMMA_FLOATS_32
#undef WGMMA_FLOATS_8
#undef WGMMA_NAMES_64
#undef WGMMA_NAMES_32

}  // namespace flash_dmattn::cuda::sm90
