#pragma once

#include <span>

#include "cpu/cpuid.h"
#include "cpu/task.h"

// The instruction set that this process computes with.
namespace flash_dmattn::cpu {

struct Candidate {
  InstructionSet isa;
  const Kernels* kernels;
};

// Of this build, those that the processor and FLASH_DMATTN_MAX_ISA allow, in ascending order. A cap that is not the name
// of an instruction set throws at every call.
std::span<const Candidate> allowed();

// The largest of them, unless choose() was called.
const Candidate& chosen();

// For tests, while nothing is computed: `candidate` is one of allowed().
void choose(const Candidate& candidate);

}  // namespace flash_dmattn::cpu
