#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/primitives/warp.cuh"

// Inline assembly, with one wrapper for each instruction. Instructions of sm_90 are guarded here; instructions that
// only sm_90a has are in hopper/ptx.cuh.
namespace flash_dmattn::cuda {

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- ldmatrix and stmatrix ----

// Loads four 8x8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l / 8, and receives
// element (l / 4, 2 (l % 4)) and its right neighbour of each matrix.
__device__ inline void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Loads four 8x8 matrices and transposes each.
__device__ inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Stores a 16x16 block of packed elements in the layout of an A operand: columns [8 c, 8 c + 8) of row r become the 16
// bytes at address(r, c). This is one instruction since sm_90.
template <class Address>
__device__ inline void store_matrix_x4(const Address& address, const std::uint32_t (&block)[4]) {
  const int lane = lane_id();
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   address(lane % 16, lane / 16)),
               "r"(block[0]), "r"(block[1]), "r"(block[2]), "r"(block[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile(
        "st.shared.u32 [%0], %1;" ::"r"(address(lane / 4 + 8 * (i % 2), i / 2) + 4 * (lane % 4)),
        "r"(block[i])
        : "memory");
  }
#endif
}

// ---- mma ----

// c += a b with a 16x16, b 16x8 and c 16x8. A lane has c at rows l / 4 and l / 4 + 8 and columns 2 (l % 4) and
// 2 (l % 4) + 1.
template <class T>
__device__ inline void mma_m16n8k16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1);

template <>
__device__ inline void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], const std::uint32_t (&a)[4],
                                                   std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void mma_m16n8k16<__half>(float (&c)[4], const std::uint32_t (&a)[4],
                                            std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- cp.async ----

// Copies 16 bytes from global to shared memory without registers.
__device__ inline void cp_async_16(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Copies the first `bytes` of 16 bytes and fills the rest with zeros. `bytes` may be 0; the other bytes are not read.
__device__ inline void cp_async_part(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ inline void cp_async_16(std::uint32_t to, const void* from, bool valid) {
  cp_async_part(to, from, valid ? 16 : 0);
}

__device__ inline void cp_async_8(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 8 : 0)
               : "memory");
}

__device__ inline void cp_async_4(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}

// Ends a group of this thread's cp.async.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups but the last `Pending`.
template <int Pending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Waits for all of this thread's cp.async.
__device__ inline void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- Shared memory ----

__device__ inline void store_shared_16(std::uint32_t to, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ inline uint4 load_shared_16(std::uint32_t from) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

__device__ inline uint2 load_shared_8(std::uint32_t from) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(from)
               : "memory");
  return value;
}

__device__ inline std::uint32_t load_shared_1(std::uint32_t from) {
  std::uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

// ---- Global memory ----

// Adds four consecutive floats, 16-byte aligned, in the L2. The vector form needs sm_90.
__device__ inline void reduce_add(float* to, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x),
               "f"(y), "f"(z), "f"(w)
               : "memory");
#else
  atomicAdd(to, x);
  atomicAdd(to + 1, y);
  atomicAdd(to + 2, z);
  atomicAdd(to + 3, w);
#endif
}

// Loads and stores that other blocks see. A relaxed access orders nothing else. An acquire load that finds the value of
// a release store is ordered after everything that the storing thread did or saw before.
__device__ inline std::int32_t load_acquire(const std::int32_t* from) {
  std::int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ inline void store_release(std::int32_t* to, std::int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ inline std::uint32_t load_relaxed(const std::uint32_t* from) {
  std::uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ inline void store_relaxed(std::uint32_t* to, std::uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// ---- Barriers and dependent launches ----

// Waits at a barrier, 1 to 15, with the warps that name the same barrier; 0 is __syncthreads. It orders memory.
__device__ inline void barrier_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

inline constexpr int block_barrier = 0;

// Waits at barrier `Barrier` with `Threads` threads, possibly all threads of the block.
template <int Barrier, int Threads>
__device__ inline void barrier_sync() {
  if constexpr (Barrier == block_barrier) {
    __syncthreads();
  } else {
    barrier_wait(Barrier, Threads);
  }
}

// Waits until earlier kernels are done and their writes are visible, which programmatic dependent launch requires.
// Before sm_90 a kernel does not start earlier.
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allows the next kernel to start once every block of this kernel has ended or has called this function.
__device__ inline void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- Clusters ----
//
// A cluster is a set of blocks that run together and access one another's shared memory, since sm_90. Before, it is one
// block.

// A barrier of all threads of a cluster. It orders memory, including global memory.
__device__ inline void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Waits for all threads of a cluster without ordering memory. A block whose shared memory others have read calls it
// before it ends.
__device__ inline void cluster_leave() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::
                   : "memory");
#endif
}

// The counterpart of `mine` in the shared memory of block `rank` of the cluster.
template <class T>
__device__ inline T* in_cluster_block(T* mine, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  std::uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(mine), "r"(rank));
  return reinterpret_cast<T*>(address);
#else
  static_cast<void>(rank);
  return mine;
#endif
}

// ---- Limits to what the compiler reorders ----
//
// These functions emit no instructions; they preserve the code's order of accesses or its values in registers.

// The compiler moves no memory access across this point.
__device__ inline void compiler_fence() { asm volatile("" ::: "memory"); }

// Makes the value unknown to the compiler, which then neither recomputes it nor shares it with an equal value.
__device__ inline void make_opaque(int& value) { asm volatile("" : "+r"(value)); }
__device__ inline void make_opaque(std::uint32_t& value) { asm volatile("" : "+r"(value)); }
// Makes a pointer to global memory unknown to the compiler.
template <class T>
__device__ inline void make_opaque(T*& pointer) {
  asm volatile("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
}
template <class T, class U, class V>
__device__ inline void make_opaque(T*& x, U*& y, V*& z) {
  asm volatile("" : "+l"(x), "+l"(y), "+l"(z));
}

// ---- Arithmetic ----

// 2^x to 2 ulp; 0 for -inf and for results below the normal range.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The result is NaN if either operand is NaN.
__device__ inline float max_or_nan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}

}  // namespace flash_dmattn::cuda
