#include "cpu/dispatch.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <span>
#include <string>

#include "flash_dmattn/error.h"

namespace flash_dmattn::cpu {
namespace {

// The instruction sets of this build, in ascending order.
constexpr Candidate candidates[] = {
    {InstructionSet::generic, &generic_kernels},
#ifdef FLASH_DMATTN_HAVE_AVX2
    {InstructionSet::avx2, &avx2_kernels},
#endif
#ifdef FLASH_DMATTN_HAVE_AVX512
    {InstructionSet::avx512, &avx512_kernels},
#endif
#ifdef FLASH_DMATTN_HAVE_AVX512_BF16
    {InstructionSet::avx512_bf16, &avx512_bf16_kernels},
#endif
#ifdef FLASH_DMATTN_HAVE_AMX_BF16
    {InstructionSet::amx_bf16, &amx_bf16_kernels},
#endif
};

// FLASH_DMATTN_MAX_ISA caps the choice, so that smaller sets can be tested on a larger machine.
const char* cap_of_choice() {
  const char* const cap = std::getenv("FLASH_DMATTN_MAX_ISA");
  return cap == nullptr || *cap == '\0' ? nullptr : cap;
}

InstructionSet largest_allowed() {
  const char* const cap = cap_of_choice();
  const InstructionSet detected = detect_instruction_set();
  if (cap == nullptr) return detected;
  for (std::size_t i = 0; i < std::size(instruction_set_names); ++i) {
    if (cap == instruction_set_names[i]) return std::min(detected, static_cast<InstructionSet>(i));
  }
  std::string known;
  for (const auto& name : instruction_set_names)
    known += (known.empty() ? "" : ", ") + std::string(name);
  throw InvalidArgument("FLASH_DMATTN_MAX_ISA", cap, "one of " + known);
}

// The largest allowed instruction set; without a cap, a smaller one that is faster.
const Candidate& preferred() {
  const std::span<const Candidate> all = allowed_instruction_sets();
  const bool avoids_largest = cap_of_choice() == nullptr && has_slow_bf16_products() &&
                              all.back().isa == InstructionSet::avx512_bf16;
  return avoids_largest ? all[all.size() - 2] : all.back();
}

std::atomic<const Candidate*>& current() {
  static std::atomic<const Candidate*> candidate = &preferred();
  return candidate;
}

}  // namespace

std::span<const Candidate> allowed_instruction_sets() {
  static const std::span<const Candidate> all = [] {
    const InstructionSet largest = largest_allowed();
    const auto* const end = std::ranges::find_if(
        candidates, [&](const Candidate& candidate) { return candidate.isa > largest; });
    return std::span(std::begin(candidates), end);
  }();
  return all;
}

const Candidate& chosen_instruction_set() { return *current(); }

std::string kernel_name(std::string_view direction, InstructionSet isa) {
  std::string name = "cpu ";
  return name.append(direction).append(" ").append(name_of(isa));
}

void choose_instruction_set(const Candidate& candidate) { current() = &candidate; }

}  // namespace flash_dmattn::cpu
