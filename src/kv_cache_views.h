#pragma once

#include "flash_dmattn/types.h"

namespace flash_dmattn {

// Views slots [B, Hkv, slots, D] as [B, slots, Hkv, D], as attention reads its keys.
inline Tensor4 by_token(const Tensor4& slots) {
  const auto& [batch, head, slot, element] = slots.stride;
  return {slots.data, {batch, slot, head, element}};
}

}  // namespace flash_dmattn
