#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/schedule/schedule.h"
#include "cuda/sm80/kernel_choice.h"
#include "cuda/sm80/params.h"
#include "cuda/stages/stages.h"

// The layout of the caller's workspace for a backward. One function lays out its arrays, and also computes its size if
// the base is null.
namespace flash_dmattn::cuda::sm80 {

// Arrays that are zeroed before the main loop. Arrays that the kernel does not use are null.
struct ZeroedArrays {
  std::uint32_t* flags = nullptr;
  OrderSemaphores semaphore;
  float* dq_accum = nullptr;
  float* dk_accum = nullptr;
  float* dv_accum = nullptr;
  float* dbias_accum = nullptr;
};

struct BackwardWorkspace {
  float* lse_log2;
  float* lse_log2_low;
  float* delta;
  ZeroedArrays zeroed;
  std::byte* zeroed_begin;
  std::size_t zeroed_bytes;
  PackedMask packed_mask;
  KeyRangeWorkspace key_ranges;
  ListSchedule schedule;
  std::size_t bytes;

  BackwardWorkspace(const Problem& p, const Inputs& in, const ListSchedule& planned,
                    const BackwardChoice& choice, void* base);
};

// Whether several elements of ds belong to one element of dbias. They are then added in fp32, in workspace.
bool accumulates_dbias(const Problem& p, const BackwardChoice& choice);

}  // namespace flash_dmattn::cuda::sm80
