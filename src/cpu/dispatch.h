#pragma once

#include "cpu/cpuid.h"
#include "cpu/task.h"

// The instruction set that this process computes with.
namespace flash_dmattn::cpu {

struct Candidate {
  InstructionSet isa;
  const Kernels* kernels;
};

// Decided once: the largest set that the processor and FLASH_DMATTN_MAX_ISA allow. A cap that is not the name of an
// instruction set throws at every call.
const Candidate& chosen();

}  // namespace flash_dmattn::cpu
