#include "cuda/sm90/kernel_choice.h"

#include <string_view>

#include "cuda/sm90/tensor_map.h"

namespace flash_dmattn::cuda::sm90 {
namespace {

constexpr std::string_view name_of(const ForwardChoice& c) {
  switch (c.load) {
    case KeyLoad::tma: return c.has_key_info ? "tma_key_info" : "tma";
    case KeyLoad::gather: return "gather";
    case KeyLoad::any: return "any";
  }
  return "";
}

}  // namespace

std::string name(const ForwardChoice& choice) {
  std::string text = "sm90 forward ";
  text.append(flash_dmattn::name_of(choice.dtype)).append(" d");
  return text.append(std::to_string(choice.head_dim)).append(" ").append(name_of(choice));
}

std::vector<ForwardChoice> forward_choices() {
  std::vector<ForwardChoice> result;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int head_dim : {64, 128}) {
      result.push_back({dtype, head_dim, KeyLoad::tma, false});
      for (const KeyLoad load : {KeyLoad::tma, KeyLoad::gather, KeyLoad::any})
        result.push_back({dtype, head_dim, load, true});
    }
  }
  return result;
}

ForwardChoice choose_forward(DType dtype, const ForwardParams& p) {
  const Shape& shape = p.shape;
  const ScoreParams& score = p.score;
  const auto tma = [&](const InputRows& tensor, int seqlen, int heads) {
    return has_tensor_map(tensor, seqlen, heads, shape.batch);
  };
  // Addresses of rows are formed with 32-bit strides.
  const auto gathers = [](const InputRows& tensor) { return tensor.aligned && tensor.row >= 0; };
  ForwardChoice choice{dtype, shape.head_dim <= 64 ? 64 : 128, KeyLoad::any, true};
  // Where inf and NaN are to be seen a product of -inf may not pass for a key that is not: `any` marks it.
  if (!p.saturate || score.form != ScoreForm::product || !p.out.aligned ||
      !tma(p.q, shape.seqlen_q, shape.heads_q)) {
    return choice;
  }
  if (p.tile_lists.keys == nullptr && tma(p.k, shape.seqlen_k, shape.heads_kv) &&
      tma(p.v, shape.seqlen_k, shape.heads_kv)) {
    choice.load = KeyLoad::tma;
    choice.has_key_info =
        score.mask.data != nullptr || score.bias.data != nullptr || score.intervals.data != nullptr;
  } else if (gathers(p.k) && gathers(p.v)) {
    choice.load = KeyLoad::gather;
  }
  return choice;
}

}  // namespace flash_dmattn::cuda::sm90
