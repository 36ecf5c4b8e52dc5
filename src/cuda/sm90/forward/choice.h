#pragma once

#include <string>

#include "cuda/attention/params.h"
#include "cuda/sm90/kernel_choice.h"

// Chooses the kernel of a forward.
namespace flash_dmattn::cuda::sm90 {

using ForwardChoice = KernelChoice<ForwardVariant>;

std::string name(const ForwardChoice& choice);

ForwardChoice choose_forward(DType dtype, const ForwardParams& params);

// Whether two heads of a group share mask and bias with DenseAccess::tiles, so that a work tile may have both.
bool has_two_heads(const ForwardParams& params);

// Whether the kernel reads the bytes of a dense mask, which is otherwise packed.
bool reads_mask_bytes(const ForwardChoice& choice, const ForwardParams& params);

}  // namespace flash_dmattn::cuda::sm90
