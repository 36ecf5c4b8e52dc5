#pragma once

#include <span>

#include "cpu/cpuid.h"
#include "cpu/task.h"

// Chooses the instruction set of this process.
namespace flash_dmattn::cpu {

struct Candidate {
  InstructionSet isa;
  const Kernels* kernels;
};

// The instruction sets of this build that the processor and FLASH_DMATTN_MAX_ISA allow, in ascending order. Throws at
// every call if the cap is not the name of an instruction set.
std::span<const Candidate> allowed();

// The largest allowed instruction set, unless choose() was called.
const Candidate& chosen();

// For tests, while no computation runs. `candidate` is an element of allowed().
void choose(const Candidate& candidate);

}  // namespace flash_dmattn::cpu
