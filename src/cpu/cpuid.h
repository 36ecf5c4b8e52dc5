#pragma once

#include <string_view>

namespace flash_dmattn::cpu {

// Instruction sets in ascending order; each includes those before it.
enum class InstructionSet { generic, avx2, avx512, avx512_bf16, amx_bf16 };

inline constexpr std::string_view instruction_set_names[] = {"generic", "avx2", "avx512",
                                                             "avx512_bf16", "amx_bf16"};

constexpr std::string_view name_of(InstructionSet isa) {
  return instruction_set_names[static_cast<int>(isa)];
}

// The largest instruction set that the processor and the operating system support.
InstructionSet detect_instruction_set();

}  // namespace flash_dmattn::cpu
