#include "cuda/sm90/kernel_choice.h"

#include <cstdlib>
#include <string_view>

#include "cuda/problem.h"
#include "cuda/sm90/forward_params.h"
#include "cuda/sm90/tensor_map.h"

namespace flash_dmattn::cuda::sm90 {
namespace {

constexpr std::string_view name_of(const ForwardVariant& variant) {
  switch (variant.dense) {
    case DenseAccess::none: break;
    case DenseAccess::tiles: return "dense";
    case DenseAccess::elements: return "dense_elementwise";
  }
  switch (variant.load) {
    case KeyLoad::tma:
      return variant.shapes ? "tma_shaped" : variant.has_key_info ? "tma_key_info" : "tma";
    case KeyLoad::gather: return "gather";
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
  const bool has_tiles = has_q_tiles && p.tile_lists.keys == nullptr &&
                         tma(p.k, shape.seqlen_k, shape.heads_kv) &&
                         tma(p.v, shape.seqlen_k, shape.heads_kv);
  if (score.mask.dense || score.bias.dense) {
    if (has_tiles && !shapes &&
        (!score.bias.dense || DenseBiasRows(shape, score.bias).has_tensor_map())) {
      return {.has_key_info = true, .dense = DenseAccess::tiles};
    }
    return {
        .load = KeyLoad::any, .has_key_info = true, .dense = DenseAccess::elements, .shapes = true};
  }
  if (has_tiles) {
    const bool of_keys =
        score.mask.data != nullptr || score.bias.data != nullptr || score.intervals.data != nullptr;
    return {.has_key_info = of_keys || shapes, .shapes = shapes};
  }
  if (has_q_tiles && !shapes && gathers(p.k) && gathers(p.v)) {
    return {.load = KeyLoad::gather, .has_key_info = true};
  }
  return {.load = KeyLoad::any, .has_key_info = true, .shapes = true};
}

}  // namespace

bool overlaps(DType dtype, int head_dim) {
  if (!has_no_overlap(dtype, head_dim)) return true;
  const char* const chosen = std::getenv("FLASH_DMATTN_CUDA_NO_OVERLAP");
  return chosen == nullptr || *chosen == '\0';
}

std::string name(const ForwardChoice& choice) {
  std::string text = "sm90 forward ";
  text.append(flash_dmattn::name_of(choice.dtype)).append(" d");
  text.append(std::to_string(choice.head_dim)).append(" ").append(name_of(choice.variant));
  return text.append(choice.variant.overlaps ? "" : " no_overlap");
}

std::vector<ForwardChoice> forward_choices() {
  std::vector<ForwardChoice> result;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int head_dim : {64, 128, 256}) {
      for (const ForwardVariant& variant : forward_variants) {
        result.push_back({dtype, head_dim, variant});
        result.back().variant.overlaps = overlaps(dtype, head_dim);
      }
    }
  }
  return result;
}

ForwardChoice choose_forward(DType dtype, const ForwardParams& p) {
  ForwardChoice choice{dtype, head_dim_bucket(p.shape.head_dim), choose_variant(p)};
  choice.variant.overlaps = overlaps(dtype, choice.head_dim);
  return choice;
}

bool has_two_heads(const ForwardParams& p) {
  const ScoreParams& score = p.score;
  return p.shape.heads_q / p.shape.heads_kv % 2 == 0 && score.mask.head_q == 0 &&
         score.packed_mask.head_q == 0 && score.bias.head_q == 0;
}

}  // namespace flash_dmattn::cuda::sm90
