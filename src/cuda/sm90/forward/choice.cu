#include "cuda/sm90/forward/choice.h"

#include "cuda/attention/problem.h"
#include "cuda/sm90/dense/rows.h"
#include "cuda/sm90/forward/params.h"

namespace flash_dmattn::cuda::sm90 {
namespace {

std::string_view name_of(const ForwardVariant& variant) {
  if (variant.dense != DenseAccess::none) return sm90::name_of(variant.dense);
  switch (variant.load) {
    case KeyLoad::tma:
      return variant.shapes ? "tma_shaped" : variant.has_key_info ? "tma_key_info" : "tma";
    case KeyLoad::gather: return variant.shapes ? "gather_shaped" : "gather";
    case KeyLoad::any: return "any";
  }
  return "";
}

ForwardVariant choose_variant(const ForwardParams& p) {
  const Shape& shape = p.shape;
  const ScoreParams& score = p.score;
  const auto tma = [&](const InputRows& tensor, int seqlen, int heads) {
    return has_tensor_map(tensor, seqlen, heads, shape.batch);
  };
  // Addresses of rows are formed with 32-bit strides.
  const auto gathers = [](const InputRows& tensor) { return tensor.aligned && tensor.row >= 0; };
  const bool shapes = shapes_scores(p);
  const bool has_q_tiles = p.out.aligned && tma(p.q, shape.seqlen_q, shape.heads_q);
  const bool has_tiles = has_q_tiles && p.tile_lists.tiles == 0 &&
                         tma(p.k, shape.seqlen_k, shape.heads_kv) &&
                         tma(p.v, shape.seqlen_k, shape.heads_kv);
  if (score.mask.dense || score.bias.dense) {
    if (has_tiles && !shapes && score.bias_delay == 0 &&
        (!score.bias.dense || DenseRows(shape, score.bias).has_tensor_map())) {
      return {.has_key_info = true, .dense = DenseAccess::tiles};
    }
    return {
        .load = KeyLoad::any, .has_key_info = true, .dense = DenseAccess::elements, .shapes = true};
  }
  if (has_tiles) {
    const bool has_key_arrays =
        score.mask.data != nullptr || score.bias.data != nullptr || score.intervals.data != nullptr;
    return {.has_key_info = has_key_arrays || shapes, .shapes = shapes};
  }
  const ForwardVariant gather{.load = KeyLoad::gather, .has_key_info = true, .shapes = shapes};
  const int head_dim = head_dim_bucket(shape.head_dim);
  const bool supports_delay_of_call = score.bias_delay == 0 || supports_delay(head_dim, gather);
  if (has_q_tiles && has_kernel(head_dim, gather) && supports_delay_of_call && gathers(p.k) &&
      gathers(p.v))
    return gather;
  return {.load = KeyLoad::any, .has_key_info = true, .shapes = true};
}

}  // namespace

std::string name(const ForwardChoice& choice) {
  return kernel_name("forward", choice, name_of(choice.variant));
}

ForwardChoice choose_forward(DType dtype, const ForwardParams& p) {
  const int head_dim = head_dim_bucket(p.shape.head_dim);
  const ForwardVariant variant = choose_variant(p);
  const int smallest = smallest_value_dim(head_dim, variant);
  return {dtype, head_dim, p.shape.value_dim <= smallest ? smallest : head_dim,
          with_overlap(variant, overlaps(dtype, head_dim))};
}

bool has_two_heads(const ForwardParams& p) {
  const ScoreParams& score = p.score;
  return p.shape.group_heads() % 2 == 0 && score.mask.head_q == 0 && score.bias.head_q == 0;
}

bool reads_mask_bytes(const ForwardChoice& choice, const ForwardParams& p) {
  const ScoreParams& score = p.score;
  return forward_policy(choice.head_dim, choice.value_dim, choice.variant).has_mask_bytes &&
         score.mask.dense && p.shape.seqlen_k % 16 == 0 &&
         DenseRows(p.shape, score.mask, 1).has_tensor_map();
}

}  // namespace flash_dmattn::cuda::sm90
