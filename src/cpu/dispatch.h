#pragma once

#include <span>
#include <string>
#include <string_view>

#include "backend.h"
#include "cpu/cpuid.h"
#include "cpu/task.h"

// Chooses the instruction set of this process.
namespace flash_dmattn::cpu {

struct Candidate {
  InstructionSet isa;
  const IsaKernels* kernels;

  const Kernels& kernels_of(DType dtype) const {
    return dtype == DType::bf16 ? kernels->bf16 : dtype == DType::f16 ? kernels->f16 : kernels->f32;
  }
};

// The instruction sets of this build that the processor and FLASH_DMATTN_MAX_ISA allow, in ascending order. Throws at
// every call if the cap is not the name of an instruction set.
std::span<const Candidate> allowed_instruction_sets();

// The fastest allowed instruction set, mostly the largest, or that of choose_instruction_set().
const Candidate& chosen_instruction_set();

// The name of the main kernel of a direction.
std::string kernel_name(std::string_view direction, InstructionSet isa);

// For tests, while no computation runs. `candidate` is an element of allowed_instruction_sets().
void choose_instruction_set(const Candidate& candidate);

}  // namespace flash_dmattn::cpu
