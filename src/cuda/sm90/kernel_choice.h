#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/attention/params.h"
#include "cuda/sm90/policy.h"
#include "flash_dmattn/attention.h"

// The kernel of the family that runs, as a value. A call chooses it once and dispatches on it; printed, it is the
// kernel's name.
namespace flash_dmattn::cuda::sm90 {

struct ForwardChoice {
  DType dtype = DType::bf16;
  int head_dim = 0;   // the bucket
  int value_dim = 0;  // the columns of V that the kernel multiplies
  ForwardVariant variant;
};

// The name of a choice, such as "sm90 forward bf16 d128 gather".
std::string name(const ForwardChoice& choice);

// The parts of a name that both directions share.
std::string kernel_name(std::string_view direction, DType dtype, int head_dim, int value_dim,
                        std::string_view variant, bool overlaps);
std::string_view name_of(DenseAccess dense);

// The reason why no kernel of either direction computes the problem; "" if some kernel does.
std::string decline_shape(const Problem& problem);

std::vector<ForwardChoice> forward_choices();

// Whether the build has kernels, in both directions, that do not overlap their products with other work. Test builds
// have them for one dtype and head-dim bucket.
constexpr bool has_no_overlap(DType dtype, int head_dim) {
  return FLASH_DMATTN_HAS_NO_OVERLAP != 0 && dtype == DType::bf16 && head_dim == 128;
}

// Whether the kernels with overlap run. They do unless there are others and FLASH_DMATTN_CUDA_NO_OVERLAP selects these.
bool overlaps(DType dtype, int head_dim);

ForwardChoice choose_forward(DType dtype, const ForwardParams& params);

// Whether two heads of a group share mask and bias with DenseAccess::tiles, so that a work tile may have both.
bool has_two_heads(const ForwardParams& params);

// Whether the kernel reads the bytes of a dense mask, which is otherwise packed together with the ranks.
bool reads_mask_bytes(const ForwardChoice& choice, const ForwardParams& params);

}  // namespace flash_dmattn::cuda::sm90
