#define FLASH_DMATTN_ISA avx512
#include "cpu/isa/avx512.h"
#include "cpu/kernels/element.h"

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {
using Bf16Element = Single;  // the factor element of bf16 arrays
}

#include "cpu/kernels/kernels.h"

namespace flash_dmattn::cpu {
const IsaKernels avx512_kernels = FLASH_DMATTN_ISA::kernels;
}
