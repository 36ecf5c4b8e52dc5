#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/primitives/ptx.cuh"

// Instructions of sm_90a that primitives/ptx.cuh does not have, one wrapper each; the matrix products are in
// wgmma.cuh. Addresses are of shared memory unless they are pointers.
namespace flash_dmattn::cuda {

// ---- Barriers in shared memory ---------------------------------------------------------------------

__device__ inline void mbarrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialised barriers visible to the copies of the TMA unit.
// Frees the memory of a barrier, which may then be initialized again.
__device__ inline void mbarrier_invalidate(std::uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives; the phase also waits for `bytes` bytes of copies.
__device__ inline void mbarrier_arrive_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at a barrier of another block of the cluster (in_cluster_block).
__device__ inline void mbarrier_arrive_in_cluster(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

// Adds to the bytes that the barrier's phase waits for, before the thread arrives.
__device__ inline void mbarrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// A thread that waits sleeps until the barrier's phase completes: without the time, in ns, it tests it every 13 cycles.
__device__ inline void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  constexpr std::uint32_t longest_sleep = 10'000'000;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity), "r"(longest_sleep)
      : "memory");
}

// ---- Barriers of warps -----------------------------------------------------------------------------

// Barriers 1 to 15; 0 is __syncthreads.
__device__ inline void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ inline void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// True in one lane of a warp; needs no register for the lane number. Called by all lanes.
__device__ inline bool elect_lane() {
  std::uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// ---- Clusters --------------------------------------------------------------------------------------

// The number of this block in its cluster.
__device__ inline int cluster_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// The address of the same place in the shared memory of block `rank` of the cluster.
__device__ inline std::uint32_t in_cluster_block(std::uint32_t address, int rank) {
  std::uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// ---- Copies ----------------------------------------------------------------------------------------

// The box of a tensor map at (column, row, head, batch). Elements outside of the tensor become 0.
__device__ inline void tma_load(std::uint32_t to, const CUtensorMap& map, std::uint32_t barrier,
                                int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Stores a tile from shared to global memory; the caller commits.
__device__ inline void tma_store(const CUtensorMap& map, std::uint32_t from, int column, int row,
                                 int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Copies consecutive bytes; size and addresses are multiples of 16.
__device__ inline void bulk_load(std::uint32_t to, const void* from, std::uint32_t bytes,
                                 std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Copies consecutive bytes to another block of the cluster; `to` and `barrier` are there.
__device__ inline void bulk_copy_in_cluster(std::uint32_t to, std::uint32_t from,
                                            std::uint32_t bytes, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Adds consecutive floats of shared memory to global memory, in the L2, and commits the group.
__device__ inline void bulk_add(float* to, std::uint32_t from, std::uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}

// Waits until at most Groups of this thread's stores and additions still read shared memory.
template <int Groups>
__device__ inline void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Groups) : "memory");
}

// Waits until all of them are in global memory.
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's accesses to shared memory before later accesses of the tensor cores and the TMA unit, which are in
// another proxy. The threads that have written fence, before the barrier at which readers wait (costs in
// docs/kernels/sm90.md).
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders accesses of global memory between the generic and the async proxy.
__device__ inline void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// The inverse of ldmatrix_x4_trans. Each 8x8 matrix is held as elements (l / 4, 2 (l % 4)) and the right neighbour;
// column i is stored as 16 bytes at the address of lane i of its eight.
__device__ inline void stmatrix_x4_trans(std::uint32_t address, const std::uint32_t (&block)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(block[0]), "r"(block[1]), "r"(block[2]), "r"(block[3])
      : "memory");
}

__device__ inline std::uint32_t load_shared_2(std::uint32_t from) {
  std::uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(from) : "memory");
  return value;
}

__device__ inline std::uint32_t load_shared_4(std::uint32_t from) {
  std::uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

// ---- Registers of a warpgroup ----------------------------------------------------------------------

template <int Registers>
__device__ inline void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ inline void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// ---- Stores under a predicate ----------------------------------------------------------------------
//
// With a branch around a store in the epilogue of a persistent loop, ptxas treats the whole loop as divergent: it then
// moves descriptors from vector to uniform registers at every wgmma, which takes 10 % of the time.

__device__ inline void store_if(bool on, float* to, float value) {
  asm volatile(
      "{\n"
      ".reg .pred on;\n"
      "setp.ne.b32 on, %0, 0;\n"
      "@on st.global.f32 [%1], %2;\n"
      "}" ::"r"(static_cast<int>(on)),
      "l"(to), "f"(value)
      : "memory");
}

__device__ inline void store_if(bool on, float* to, float x, float y) {
  asm volatile(
      "{\n"
      ".reg .pred on;\n"
      "setp.ne.b32 on, %0, 0;\n"
      "@on st.global.v2.f32 [%1], {%2, %3};\n"
      "}" ::"r"(static_cast<int>(on)),
      "l"(to), "f"(x), "f"(y)
      : "memory");
}

__device__ inline void store_if(bool on, void* to, std::uint32_t value) {
  asm volatile(
      "{\n"
      ".reg .pred on;\n"
      "setp.ne.b32 on, %0, 0;\n"
      "@on st.global.b32 [%1], %2;\n"
      "}" ::"r"(static_cast<int>(on)),
      "l"(to), "r"(value)
      : "memory");
}

__device__ inline void store_if(bool on, void* to, const std::uint32_t (&value)[4]) {
  asm volatile(
      "{\n"
      ".reg .pred on;\n"
      "setp.ne.b32 on, %0, 0;\n"
      "@on st.global.v4.b32 [%1], {%2, %3, %4, %5};\n"
      "}" ::"r"(static_cast<int>(on)),
      "l"(to), "r"(value[0]), "r"(value[1]), "r"(value[2]), "r"(value[3])
      : "memory");
}

__device__ inline void store_16_bits_if(bool on, void* to, std::uint32_t value) {
  asm volatile(
      "{\n"
      ".reg .pred on;\n"
      ".reg .b16 low;\n"
      "setp.ne.b32 on, %0, 0;\n"
      "cvt.u16.u32 low, %2;\n"
      "@on st.global.b16 [%1], low;\n"
      "}" ::"r"(static_cast<int>(on)),
      "l"(to), "r"(value)
      : "memory");
}

__device__ inline void set_flag_if(bool on, std::uint32_t* flag) {
  asm volatile(
      "{\n"
      ".reg .pred on;\n"
      "setp.ne.b32 on, %0, 0;\n"
      "@on st.relaxed.gpu.global.u32 [%1], 1;\n"
      "}" ::"r"(static_cast<int>(on)),
      "l"(flag)
      : "memory");
}

// ---- Bits ----

// Byte i of the result is eight times the highest bit of the byte of (x, y) that the lowest three bits of the i-th
// four of `bytes` choose; the highest bit of these is 1.
__device__ inline std::uint32_t spread_signs(std::uint32_t x, std::uint32_t y,
                                             std::uint32_t bytes) {
  std::uint32_t spread;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(spread) : "r"(x), "r"(y), "r"(bytes));
  return spread;
}

// ---- Arithmetic without branches -------------------------------------------------------------------

__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flash_dmattn::cuda
