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

// Whether vdpbf16ps multiplies no more elements in a cycle than a multiply-add of fp32. So it is on Intel's processors,
// where bf16 takes 1.6 times as long with avx512_bf16 as with avx512 (a Xeon of family 6, model 207).
bool has_slow_bf16_products();

}  // namespace flash_dmattn::cpu
