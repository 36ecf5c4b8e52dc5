#define FLASH_DMATTN_ISA avx512_bf16
#include "cpu/isa/bf16_packed2.h"

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {
using Bf16Element = Bf16Packed2;  // the factor element of bf16 arrays
}

#include "cpu/kernels/kernels.h"

namespace flash_dmattn::cpu {
const IsaKernels avx512_bf16_kernels = FLASH_DMATTN_ISA::kernels;
}
