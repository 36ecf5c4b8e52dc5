#define FLASH_DMATTN_ISA amx_bf16
#include "cpu/isa/amx_tiles.h"

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {
using Bf16Element = TilePair;  // what bf16 arrays are multiplied as
}

#include "cpu/kernels.h"

namespace flash_dmattn::cpu {
const Kernels amx_bf16_kernels = FLASH_DMATTN_ISA::kernels;
}
