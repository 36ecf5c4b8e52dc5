#include "cuda/sm90/backward/choice.h"

#include "cuda/attention/problem.h"
#include "cuda/sm90/dense/rows.h"

namespace flash_dmattn::cuda::sm90 {
namespace {

std::string_view name_of(const BackwardVariant& variant) {
  if (variant.dense != DenseAccess::none) return sm90::name_of(variant.dense);
  switch (variant.placement) {
    case KeyPlacement::block: return "block";
    case KeyPlacement::block_key_info:
      return variant.delays ? "block_key_info_delayed" : "block_key_info";
    case KeyPlacement::slots: return variant.delays ? "slots_delayed" : "slots";
  }
  return "";
}

BackwardVariant choose_variant(const BackwardArgs& args, bool has_slots) {
  const Problem& p = args.problem;
  if (is_dense(p.mask_shape) || is_dense(p.bias_shape)) {
    const ScoreParams score = score_of(p, args.in);
    const bool tiles = !score.bias.dense || DenseRows(shape_of(p), score.bias).has_tensor_map();
    return {KeyPlacement::block_key_info, tiles ? DenseAccess::tiles : DenseAccess::elements};
  }
  const bool has_intervals = args.in.visibility.intervals.data != nullptr;
  // The heads of a group visit a slot together, so they must not differ.
  const auto differs_in_group = [&](const BroadcastShape& shape) {
    return shape[1] == p.heads_q && p.heads_q != p.heads_kv && shape[1] > 1;
  };
  if (has_slots && !differs_in_group(p.mask_shape) && !differs_in_group(p.bias_shape)) {
    return {.placement = KeyPlacement::slots, .delays = p.bias_delay != 0};
  }
  const bool has_info = has_intervals || has(p.mask_shape) || has(p.bias_shape);
  return {.placement = has_info ? KeyPlacement::block_key_info : KeyPlacement::block,
          .delays = p.bias_delay != 0};
}

}  // namespace

std::string name(const BackwardChoice& choice) {
  return kernel_name("backward", choice, name_of(choice.variant));
}

BackwardChoice choose_backward(const BackwardArgs& args, bool has_slots) {
  const Problem& p = args.problem;
  const BackwardVariant variant = choose_variant(args, has_slots);
  const int head_dim = head_dim_bucket(static_cast<int>(p.head_dim), variant);
  const int smallest = smallest_value_dim(head_dim, variant);
  return {p.dtype, head_dim, value_dim_of(p) <= smallest ? smallest : head_dim,
          with_overlap(variant, overlaps(p.dtype, head_dim))};
}

}  // namespace flash_dmattn::cuda::sm90
