#include "cpu/cpuid.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flash_dmattn::cpu {
namespace {

#if defined(__x86_64__)
// Linux grants the tile registers, 8 KiB of state per thread, only to processes that request them.
bool request_tiles() {
#if defined(__linux__)
  constexpr long arch_req_xcomp_perm = 0x1023;
  constexpr long xfeature_xtiledata = 18;
  return syscall(SYS_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata) == 0;
#else
  return false;
#endif
}

InstructionSet detect() {
  // The builtins also test whether the operating system saves the registers.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c")) {
    return InstructionSet::generic;
  }
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!avx512) return InstructionSet::avx2;
  if (!__builtin_cpu_supports("avx512bf16")) return InstructionSet::avx512;
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  const bool amx = (edx >> 24 & 1) != 0 && (edx >> 22 & 1) != 0;  // AMX-TILE, AMX-BF16
  return amx && request_tiles() ? InstructionSet::amx_bf16 : InstructionSet::avx512_bf16;
}
bool is_intel() { return __builtin_cpu_is("intel") != 0; }
#else
InstructionSet detect() { return InstructionSet::generic; }
bool is_intel() { return false; }
#endif

}  // namespace

InstructionSet detect_instruction_set() {
  static const InstructionSet detected = detect();
  return detected;
}

bool has_slow_bf16_products() {
  static const bool slow = is_intel();
  return slow;
}

}  // namespace flash_dmattn::cpu
