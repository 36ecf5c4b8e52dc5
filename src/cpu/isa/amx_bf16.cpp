#define FLASH_DMATTN_ISA amx_bf16
#include "cpu/isa/amx_tiles.h"

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {
using Bf16Element = TilePacked2;  // the factor element of bf16 arrays
}

#include "cpu/kernels/kernels.h"

namespace flash_dmattn::cpu {
const IsaKernels amx_bf16_kernels = FLASH_DMATTN_ISA::kernels;
}
