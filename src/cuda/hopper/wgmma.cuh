#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

// Products of a warpgroup: D[64, N] += A[64, 16] B[16, N], with D in registers and B in shared memory. They run
// asynchronously; a batch is fenced, issued, committed and awaited.
//
// A thread's accumulator d[4 i + e] is row lane / 4 + 8 (e / 2) of its warp's 16 and column 8 i + 2 (lane % 4) + e % 2.
// Packed to 16 bits, the accumulators of 16 columns are A's registers of the next product.
namespace flash_dmattn::cuda {

// ---- Order -----------------------------------------------------------------------------------------

// Orders earlier writes of registers before products that read them. Every batch needs its own fence. If it is missing,
// ptxas adds one and serializes the products (C7520).
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most Batches committed batches are in flight.
template <int Batches>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Batches) : "memory");
}

// Keeps reads of d after this point. Called after a wait.
template <int N>
__device__ inline void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- Operands in shared memory ---------------------------------------------------------------------
//
// Tiles of rows consist of panels of 64 columns, with 128 bytes a row and 16-byte chunks swizzled by the row's lowest
// three bits (the TMA unit's SWIZZLE_128B). Panels are at multiples of 1024 bytes. A descriptor counts in units of 16
// bytes.

inline constexpr int panel_columns = 64;
inline constexpr int panel_row_bytes = 128;

__device__ inline std::uint64_t swizzled_descriptor(std::uint32_t address,
                                                    std::uint32_t leading_bytes) {
  constexpr std::uint64_t swizzle_128 = 1;
  constexpr std::uint64_t eight_rows = 8 * panel_row_bytes;
  return swizzle_128 << 62 | eight_rows >> 4 << 32 |
         static_cast<std::uint64_t>(leading_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// An operand of Rows rows whose columns are summed over, in steps of 16 columns.
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

// An operand of Rows rows that are summed over, in steps of 16 rows.
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

// The layout of an operand in shared memory: rows whose columns are summed over, or rows that are summed over.
enum class Major : std::uint8_t { k, mn };

// Lists of an instruction's accumulators, each of which inline assembly needs by name.
#define WGMMA_NAMES_32                                                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_64                                                                           \
  WGMMA_NAMES_32                                                                                 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_56 WGMMA_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_NAMES_96                                                                           \
  WGMMA_NAMES_64                                                                                 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_128                                                                          \
  WGMMA_NAMES_64                                                                                 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "   \
  "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, "   \
  "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// ACCESS is "+f" for accumulators that are added to, and "=f" for accumulators that are only written.
#define WGMMA_FLOATS_8(ACCESS, i)                                                       \
  ACCESS(d[i]), ACCESS(d[i + 1]), ACCESS(d[i + 2]), ACCESS(d[i + 3]), ACCESS(d[i + 4]), \
      ACCESS(d[i + 5]), ACCESS(d[i + 6]), ACCESS(d[i + 7])
#define WGMMA_FLOATS_32(ACCESS)                                                     \
  WGMMA_FLOATS_8(ACCESS, 0), WGMMA_FLOATS_8(ACCESS, 8), WGMMA_FLOATS_8(ACCESS, 16), \
      WGMMA_FLOATS_8(ACCESS, 24)
#define WGMMA_FLOATS_40(ACCESS) WGMMA_FLOATS_32(ACCESS), WGMMA_FLOATS_8(ACCESS, 32)
#define WGMMA_FLOATS_48(ACCESS) WGMMA_FLOATS_40(ACCESS), WGMMA_FLOATS_8(ACCESS, 40)
#define WGMMA_FLOATS_56(ACCESS) WGMMA_FLOATS_48(ACCESS), WGMMA_FLOATS_8(ACCESS, 48)
#define WGMMA_FLOATS_64(ACCESS)                                                    \
  WGMMA_FLOATS_32(ACCESS), WGMMA_FLOATS_8(ACCESS, 32), WGMMA_FLOATS_8(ACCESS, 40), \
      WGMMA_FLOATS_8(ACCESS, 48), WGMMA_FLOATS_8(ACCESS, 56)
#define WGMMA_FLOATS_96(ACCESS)                                                    \
  WGMMA_FLOATS_64(ACCESS), WGMMA_FLOATS_8(ACCESS, 64), WGMMA_FLOATS_8(ACCESS, 72), \
      WGMMA_FLOATS_8(ACCESS, 80), WGMMA_FLOATS_8(ACCESS, 88)
#define WGMMA_FLOATS_128(ACCESS)                                                          \
  WGMMA_FLOATS_64(ACCESS), WGMMA_FLOATS_8(ACCESS, 64), WGMMA_FLOATS_8(ACCESS, 72),        \
      WGMMA_FLOATS_8(ACCESS, 80), WGMMA_FLOATS_8(ACCESS, 88), WGMMA_FLOATS_8(ACCESS, 96), \
      WGMMA_FLOATS_8(ACCESS, 104), WGMMA_FLOATS_8(ACCESS, 112), WGMMA_FLOATS_8(ACCESS, 120)

// A and B are in shared memory. A, B, ADD, MAJOR_A and MAJOR_B are operand numbers; operand ADD is whether d is added
// to.
#define WGMMA_SS_OF(TYPE, SHAPE, N, ACCESS, A, B, ADD, MAJOR_A, MAJOR_B)                        \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD                                    \
               ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE                \
               " {" WGMMA_NAMES_##N "}, %" #A ", %" #B ", add, 1, 1, %" #MAJOR_A ", %" #MAJOR_B \
                                    ";\n}"                                                      \
               : WGMMA_FLOATS_##N(ACCESS)                                                       \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(MajorA)),     \
                 "n"(static_cast<int>(MajorB)))

// A is in registers, B is row-major, and the product is added to d.
#define WGMMA_RS_OF(TYPE, SHAPE, N, ACCESS, A0, A1, A2, A3, B)                                     \
  asm volatile("{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\nwgmma.mma_async.sync.aligned." SHAPE   \
               ".f32." TYPE "." TYPE " {" WGMMA_NAMES_##N "}, {%" #A0 ", %" #A1 ", %" #A2          \
                                                          ", %" #A3 "}, %" #B ", add, 1, 1, 1;\n}" \
               : WGMMA_FLOATS_##N(ACCESS)                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// Selects the instruction for the dtype T.
#define WGMMA_SS(...)                               \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) { \
    WGMMA_SS_OF("bf16", __VA_ARGS__);               \
  } else {                                          \
    WGMMA_SS_OF("f16", __VA_ARGS__);                \
  }
#define WGMMA_RS(...)                               \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) { \
    WGMMA_RS_OF("bf16", __VA_ARGS__);               \
  } else {                                          \
    WGMMA_RS_OF("f16", __VA_ARGS__);                \
  }

// d = a b or d += a b.
template <class T, Major MajorA = Major::k, Major MajorB = MajorA>
__device__ inline void wgmma(float (&d)[96], std::uint64_t a, std::uint64_t b, bool add) {
  WGMMA_SS("m64n192k16", 96, "+f", 96, 97, 98, 99, 100)
}

template <class T, Major MajorA = Major::k, Major MajorB = MajorA>
__device__ inline void wgmma(float (&d)[64], std::uint64_t a, std::uint64_t b, bool add) {
  WGMMA_SS("m64n128k16", 64, "+f", 64, 65, 66, 67, 68)
}

template <class T, Major MajorA = Major::k, Major MajorB = MajorA>
__device__ inline void wgmma(float (&d)[56], std::uint64_t a, std::uint64_t b, bool add) {
  WGMMA_SS("m64n112k16", 56, "+f", 56, 57, 58, 59, 60)
}

template <class T, Major MajorA = Major::k, Major MajorB = MajorA>
__device__ inline void wgmma(float (&d)[48], std::uint64_t a, std::uint64_t b, bool add) {
  WGMMA_SS("m64n96k16", 48, "+f", 48, 49, 50, 51, 52)
}

template <class T, Major MajorA = Major::k, Major MajorB = MajorA>
__device__ inline void wgmma(float (&d)[40], std::uint64_t a, std::uint64_t b, bool add) {
  WGMMA_SS("m64n80k16", 40, "+f", 40, 41, 42, 43, 44)
}

template <class T, Major MajorA = Major::k, Major MajorB = MajorA>
__device__ inline void wgmma(float (&d)[32], std::uint64_t a, std::uint64_t b, bool add) {
  WGMMA_SS("m64n64k16", 32, "+f", 32, 33, 34, 35, 36)
}

// d = a b. If one of the functions above were the first step of a sum, the old values of d would stay live throughout a
// loop.
template <class T, Major MajorA, Major MajorB = MajorA>
__device__ inline void wgmma_first(float (&d)[64], std::uint64_t a, std::uint64_t b) {
  constexpr bool add = false;
  WGMMA_SS("m64n128k16", 64, "=f", 64, 65, 66, 67, 68)
}

template <class T, Major MajorA, Major MajorB = MajorA>
__device__ inline void wgmma_first(float (&d)[48], std::uint64_t a, std::uint64_t b) {
  constexpr bool add = false;
  WGMMA_SS("m64n96k16", 48, "=f", 48, 49, 50, 51, 52)
}

template <class T, Major MajorA, Major MajorB = MajorA>
__device__ inline void wgmma_first(float (&d)[32], std::uint64_t a, std::uint64_t b) {
  constexpr bool add = false;
  WGMMA_SS("m64n64k16", 32, "=f", 32, 33, 34, 35, 36)
}

// d += a b.
template <class T>
__device__ inline void wgmma(float (&d)[128], const std::uint32_t* a, std::uint64_t b) {
  WGMMA_RS("m64n256k16", 128, "+f", 128, 129, 130, 131, 132)
}

template <class T>
__device__ inline void wgmma(float (&d)[96], const std::uint32_t* a, std::uint64_t b) {
  WGMMA_RS("m64n192k16", 96, "+f", 96, 97, 98, 99, 100)
}

template <class T>
__device__ inline void wgmma(float (&d)[64], const std::uint32_t* a, std::uint64_t b) {
  WGMMA_RS("m64n128k16", 64, "+f", 64, 65, 66, 67, 68)
}

template <class T>
__device__ inline void wgmma(float (&d)[48], const std::uint32_t* a, std::uint64_t b) {
  WGMMA_RS("m64n96k16", 48, "+f", 48, 49, 50, 51, 52)
}

template <class T>
__device__ inline void wgmma(float (&d)[32], const std::uint32_t* a, std::uint64_t b) {
  WGMMA_RS("m64n64k16", 32, "+f", 32, 33, 34, 35, 36)
}

#undef WGMMA_RS
#undef WGMMA_SS
#undef WGMMA_RS_OF
#undef WGMMA_SS_OF
#undef WGMMA_FLOATS_128
#undef WGMMA_FLOATS_96
#undef WGMMA_FLOATS_64
#undef WGMMA_FLOATS_56
#undef WGMMA_FLOATS_48
#undef WGMMA_FLOATS_40
#undef WGMMA_FLOATS_32
#undef WGMMA_FLOATS_8
#undef WGMMA_NAMES_128
#undef WGMMA_NAMES_96
#undef WGMMA_NAMES_64
#undef WGMMA_NAMES_56
#undef WGMMA_NAMES_48
#undef WGMMA_NAMES_40
#undef WGMMA_NAMES_32

}  // namespace flash_dmattn::cuda
