#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/params.h"
#include "cuda/sm90/policy.h"
#include "flash_dmattn/attention.h"

// Which kernel of the family runs, as a value. It is chosen once in a call and dispatched on; printed, it is
// the kernel's name.
namespace flash_dmattn::cuda::sm90 {

struct ForwardChoice {
  DType dtype = DType::bf16;
  int head_dim = 0;  // the bucket: 64 or 128
  KeyLoad load = KeyLoad::tma;
  bool has_key_info = false;  // intervals, mask or bias; with lists and any strides always
};

// "sm90 forward bf16 d128 gather"
std::string name(const ForwardChoice& choice);

std::vector<ForwardChoice> forward_choices();

ForwardChoice choose_forward(DType dtype, const ForwardParams& params);

}  // namespace flash_dmattn::cuda::sm90
