#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/params.h"
#include "cuda/sm90/policy.h"
#include "flash_dmattn/attention.h"

// Which kernel of the family runs, as a value. It is chosen once in a call and dispatched on; printed, it is
// the kernel's name.
namespace flash_dmattn::cuda::sm90 {

struct ForwardChoice {
  DType dtype = DType::bf16;
  int head_dim = 0;  // the bucket
  ForwardVariant variant;
};

// "sm90 forward bf16 d128 gather"
std::string name(const ForwardChoice& choice);

// The parts of such a name that both directions have.
std::string kernel_name(std::string_view direction, DType dtype, int head_dim,
                        std::string_view variant, bool overlaps);
std::string_view name_of(DenseAccess dense);

// Why no kernel of either direction computes the problem; "" when some do.
std::string decline_shape(const Problem& problem);

std::vector<ForwardChoice> forward_choices();

// Whether the build has kernels, of both directions, that do not overlap their products with other work: test builds
// have them for one dtype and head-dim bucket.
constexpr bool has_no_overlap(DType dtype, int head_dim) {
  return FLASH_DMATTN_HAS_NO_OVERLAP != 0 && dtype == DType::bf16 && head_dim == 128;
}

// Whether the kernels that overlap run: unless there are others and FLASH_DMATTN_CUDA_NO_OVERLAP chooses them.
bool overlaps(DType dtype, int head_dim);

ForwardChoice choose_forward(DType dtype, const ForwardParams& params);

// With DenseAccess::tiles: whether two heads of a group share mask and bias, so that a work tile may be of both.
bool has_two_heads(const ForwardParams& params);

// Whether the kernel reads the bytes of a dense mask, which otherwise is packed, with the ranks.
bool reads_mask_bytes(const ForwardParams& params);

}  // namespace flash_dmattn::cuda::sm90
