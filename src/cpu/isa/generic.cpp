#define FLASH_DMATTN_ISA generic
#include "cpu/isa/generic.h"
#include "cpu/kernels/element.h"

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {
using Bf16Element = Single;  // the factor element of bf16 arrays
}

#include "cpu/kernels/kernels.h"

namespace flash_dmattn::cpu {
const IsaKernels generic_kernels = FLASH_DMATTN_ISA::kernels;
}
