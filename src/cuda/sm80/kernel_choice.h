#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/attention/params.h"
#include "cuda/device.h"
#include "cuda/sm80/policy.h"
#include "flash_dmattn/attention.h"

// The kernel of the family that runs, as a value. A call chooses it once and dispatches on it; printed, it is the
// kernel's name. The kernels that are compiled are the values for which `exists` is true.
namespace flash_dmattn::cuda::sm80 {

enum class ForwardLoop : std::uint8_t {
  key_range,          // all keys between the first and the last that a query tile sees
  key_list,           // the keys of the query tile's list
  dense_elementwise,  // the keys of either, with a dense mask or bias that is read element by element
  dense,              // key_range, with tiles of the dense mask and bias in shared memory
  dense_two_heads,    // the same for two heads of a group that share them
};

struct ForwardChoice {
  DType dtype = DType::bf16;
  int head_dim = 0;  // the bucket: 64, 128 or 256
  SharedClass shared = SharedClass::kb163;
  ForwardLoop loop = ForwardLoop::key_range;
};

constexpr bool exists(const ForwardChoice& c) {
  return c.loop != ForwardLoop::dense_two_heads || c.head_dim <= 128;
}

enum class BackwardLoop : std::uint8_t {
  key_major,          // a block owns keys, dq is added in memory
  key_major_dense,    // the same with a dense mask or bias
  query_major,        // a block owns queries, dk and dv are added in memory
  query_major_dense,  // the same with a dense mask or bias
};

constexpr bool is_key_major(BackwardLoop loop) {
  return loop == BackwardLoop::key_major || loop == BackwardLoop::key_major_dense;
}

struct BackwardChoice {
  DType dtype = DType::bf16;
  int head_dim = 0;
  SharedClass shared = SharedClass::kb163;
  BackwardLoop loop = BackwardLoop::query_major;
  bool ordered = false;  // blocks add in the order of a semaphore, if the call has one
};

constexpr bool exists(const BackwardChoice& c) {
  switch (c.loop) {
    case BackwardLoop::key_major: return has_key_major_backward(c.head_dim, c.shared);
    case BackwardLoop::key_major_dense:
      return has_key_major_backward(c.head_dim, c.shared) && !c.ordered;
    case BackwardLoop::query_major: return true;
    case BackwardLoop::query_major_dense: return c.ordered;  // one kernel covers both
  }
  return false;
}

// The name of a choice, such as "sm80 forward bf16 d128 key_list 163KB".
std::string name(const ForwardChoice& choice);
std::string name(const BackwardChoice& choice);

// The end of every kernel's name.
constexpr std::string_view class_suffix(SharedClass shared) {
  return shared == SharedClass::kb99 ? " 99KB" : " 163KB";
}

SharedClass shared_class(const DeviceProperties& device);

// Whether the build omits the forwards of a head-dim bucket for a GPU, on which a newer family computes them.
bool omits_forward(int head_dim_bucket, const DeviceProperties& device);

// All kernels of the build for a GPU with this much shared memory.
std::vector<ForwardChoice> forward_choices(SharedClass shared);
std::vector<BackwardChoice> backward_choices(SharedClass shared);

ForwardChoice choose_forward(const Problem& p, const ForwardParams& params, SharedClass shared);

// The facts that a backward choice depends on in addition to the problem.
struct BackwardTraits {
  bool has_lists = false;
  bool dbias_aligned =
      false;  // four elements of a dense bias, and of its gradient, are one aligned word
  bool wants_dq = true;
};
BackwardChoice choose_backward(const Problem& p, const BackwardTraits& traits, SharedClass shared);

}  // namespace flash_dmattn::cuda::sm80
