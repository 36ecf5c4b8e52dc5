#include "cuda/sm80/kernel_choice.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "cuda/attention/problem.h"
#include "cuda/family.h"
#include "sm80/compiled.h"

namespace flash_dmattn::cuda::sm80 {
namespace {

constexpr std::array dtypes = {DType::bf16, DType::f16};
constexpr std::array forward_loops = {ForwardLoop::key_range, ForwardLoop::key_list,
                                      ForwardLoop::dense_elementwise, ForwardLoop::dense,
                                      ForwardLoop::dense_two_heads};
constexpr std::array backward_loops = {BackwardLoop::key_major, BackwardLoop::key_major_dense,
                                       BackwardLoop::query_major, BackwardLoop::query_major_dense};

constexpr std::string_view name_of(ForwardLoop loop) {
  switch (loop) {
    case ForwardLoop::key_range: return "key_range";
    case ForwardLoop::key_list: return "key_list";
    case ForwardLoop::dense_elementwise: return "dense_elementwise";
    case ForwardLoop::dense: return "dense";
    case ForwardLoop::dense_two_heads: return "dense_two_heads";
  }
  return "";
}

constexpr std::string_view name_of(BackwardLoop loop) {
  switch (loop) {
    case BackwardLoop::key_major: return "key_major";
    case BackwardLoop::key_major_dense: return "key_major_dense";
    case BackwardLoop::query_major: return "query_major";
    case BackwardLoop::query_major_dense: return "query_major_dense";
  }
  return "";
}

template <class Choice>
std::string name_in(std::string_view direction, const Choice& c) {
  std::string name = kernel_name("sm80", direction, c.dtype, c.head_dim);
  return name.append(" ").append(name_of(c.loop)).append(class_suffix(c.shared));
}

}  // namespace

std::string name(const ForwardChoice& choice) { return name_in("forward", choice); }

std::string name(const BackwardChoice& choice) {
  const bool one_of_two = choice.loop != BackwardLoop::query_major_dense;
  return name_in("backward", choice) + (choice.ordered && one_of_two ? " ordered" : "");
}

SharedClass shared_class(const DeviceProperties& device) {
  return device.shared_bytes >= static_cast<int>(shared_bytes(SharedClass::kb163))
             ? SharedClass::kb163
             : SharedClass::kb99;
}

bool omits_forward(int head_dim_bucket, const DeviceProperties& device) {
  return std::any_of(omitted_forwards.begin(), omitted_forwards.end(),
                     [&](const OmittedForward& omitted) {
                       return omitted.head_dim_bucket == head_dim_bucket &&
                              omitted.compute_capability == device.compute_capability;
                     });
}

std::vector<ForwardChoice> forward_choices(SharedClass shared) {
  std::vector<ForwardChoice> result;
  for (const DType dtype : dtypes) {
    for (const int head_dim : head_dims) {
      for (const ForwardLoop loop : forward_loops) {
        const ForwardChoice choice{dtype, head_dim, shared, loop};
        if (exists(choice)) result.push_back(choice);
      }
    }
  }
  return result;
}

std::vector<BackwardChoice> backward_choices(SharedClass shared) {
  std::vector<BackwardChoice> result;
  for (const DType dtype : dtypes) {
    for (const int head_dim : head_dims) {
      for (const BackwardLoop loop : backward_loops) {
        for (const bool ordered : {false, true}) {
          const BackwardChoice choice{dtype, head_dim, shared, loop, ordered};
          if (exists(choice)) result.push_back(choice);
        }
      }
    }
  }
  return result;
}

ForwardChoice choose_forward(const Problem& p, const ForwardParams& params, SharedClass shared) {
  ForwardChoice choice{p.dtype, head_dim_bucket(static_cast<int>(p.head_dim)), shared,
                       ForwardLoop::key_range};
  const ScoreParams& score = params.score;
  const bool has_lists = params.tile_lists.tiles != 0;
  if (!score.mask.dense && !score.bias.dense) {
    if (has_lists) choice.loop = ForwardLoop::key_list;
    return choice;
  }
  const bool by_tiles = !has_lists && score.form != ScoreForm::capped &&
                        (!score.bias.dense || score.bias.aligned_16B);
  const bool heads_share = score.mask.head_q == 0 && score.bias.head_q == 0;
  const bool in_twos = p.heads_kv > 0 && p.heads_q / p.heads_kv % 2 == 0;
  choice.loop = ForwardLoop::dense_two_heads;
  if (by_tiles && heads_share && in_twos && exists(choice)) return choice;
  choice.loop = by_tiles ? ForwardLoop::dense : ForwardLoop::dense_elementwise;
  return choice;
}

BackwardChoice choose_backward(const Problem& p, const BackwardTraits& traits, SharedClass shared) {
  BackwardChoice choice{p.dtype, head_dim_bucket(static_cast<int>(p.head_dim)), shared,
                        BackwardLoop::query_major, p.deterministic};
  const bool dense_bias = is_dense(p.bias_shape);
  const bool dense = is_dense(p.mask_shape) || dense_bias;
  // With a softcap, the dk warps would need its slope in addition to P; delayed biases would spill registers at D 128.
  // Additions to the gradient of a dense bias have no fixed order here.
  const bool bias_fits =
      !dense_bias || (traits.dbias_aligned && p.bias_shape[3] > 1 && size_of(p.bias_dtype) == 2);
  if (p.softcap <= 0 && p.bias_delay == 0 && !traits.has_lists &&
      (!dense || (p.seqlen_k % 4 == 0 && bias_fits))) {
    choice.loop = dense ? BackwardLoop::key_major_dense : BackwardLoop::key_major;
    if (exists(choice)) {
      choice.ordered = p.deterministic && traits.wants_dq;  // only dq is added in memory
      return choice;
    }
  }
  choice.loop = dense ? BackwardLoop::query_major_dense : BackwardLoop::query_major;
  choice.ordered = dense || p.deterministic;
  return choice;
}

}  // namespace flash_dmattn::cuda::sm80
