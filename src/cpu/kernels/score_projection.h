#pragma once

#include <cstdint>

#include "cpu/kernels/element.h"
#include "cpu/task.h"

// The projection of scores (flash_dmattn/scores.h). Products and sums are rounded apart, because SSE2 has no fused form.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// Tokens and heads that are computed together: 16 or 8 sums, the tokens' and one head's vectors fit into the registers.
inline constexpr int tokens_at_once = lanes == 16 ? 4 : 2;
inline constexpr int heads_at_once = 4;
// Features of one pass over `lanes` of the partial sums. The features and weights of a pass stay in the L1 for the passes
// over the other sums.
inline constexpr std::int64_t pass_features = 1024;

// Adds products of features [begin, end) to the partial sums of each head and token. begin is a multiple of
// projection_sums.
template <class In, class Weight, int Heads, int Tokens>
void add_products(const typename In::Storage* const (&hidden)[Tokens],
                  const typename Weight::Storage* weight, std::int64_t weight_head,
                  std::int64_t begin, std::int64_t end,
                  float (&sums)[Heads][Tokens][projection_sums]) {
  for (int first = 0; first < projection_sums; first += lanes) {
    Vec own[Heads][Tokens];
    for (int h = 0; h < Heads; ++h) {
      for (int t = 0; t < Tokens; ++t) own[h][t] = load(sums[h][t] + first);
    }
    const auto add = [&](std::int64_t f, int count) {
      Vec features[Tokens];
      for (int t = 0; t < Tokens; ++t) features[t] = load_widened<In>(hidden[t] + f, count);
      for (int h = 0; h < Heads; ++h) {
        const Vec weights = load_widened<Weight>(weight + h * weight_head + f, count);
        for (int t = 0; t < Tokens; ++t) own[h][t] = own[h][t] + features[t] * weights;
      }
    };
    std::int64_t f = begin + first;
    for (; f + lanes <= end; f += projection_sums) add(f, lanes);
    if (f < end) add(f, static_cast<int>(end - f));
    for (int h = 0; h < Heads; ++h) {
      for (int t = 0; t < Tokens; ++t) store(sums[h][t] + first, own[h][t]);
    }
  }
}

// Adds each half of the sums to the other half, until one is left.
inline float fold_sums(const float* sums) {
  constexpr int vectors = projection_sums / lanes;
  Vec v[vectors];
  for (int i = 0; i < vectors; ++i) v[i] = load(sums + i * lanes);
  for (int n = vectors / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) v[i] = v[i] + v[i + n];
  }
  return reduce_add(v[0]);
}

// The tokens [first, first + Tokens) of all rows, and Heads heads.
template <class In, class Weight, int Heads, int Tokens>
void project_tile(const ScoreProjectionTask& task, std::int64_t first, std::int64_t head) {
  const typename In::Storage* hidden[Tokens];
  float* scores[Tokens];
  for (int t = 0; t < Tokens; ++t) {
    const std::int64_t b = (first + t) / task.seqlen;
    const std::int64_t s = (first + t) % task.seqlen;
    hidden[t] = static_cast<const typename In::Storage*>(task.hidden) + b * task.hidden_batch +
                s * task.hidden_token;
    scores[t] = task.scores + (b * task.heads + head) * task.seqlen + s;
  }
  const auto* weight =
      static_cast<const typename Weight::Storage*>(task.weight) + head * task.weight_head;
  float sums[Heads][Tokens][projection_sums] = {};
  for (std::int64_t begin = 0; begin < task.features; begin += pass_features) {
    const std::int64_t end =
        task.features - begin < pass_features ? task.features : begin + pass_features;
    add_products<In, Weight>(hidden, weight, task.weight_head, begin, end, sums);
  }
  for (int h = 0; h < Heads; ++h) {
    for (int t = 0; t < Tokens; ++t) {
      float score = fold_sums(sums[h][t]);
      if (task.bias != nullptr) score += load_scalar(task.bias, task.bias_dtype, head + h);
      scores[t][h * task.seqlen] = score;
    }
  }
}

template <class In, class Weight, int Heads>
void project_heads(const ScoreProjectionTask& task, std::int64_t begin, std::int64_t end,
                   std::int64_t& head) {
  for (; head + Heads <= task.heads; head += Heads) {
    std::int64_t t = begin;
    for (; t + tokens_at_once <= end; t += tokens_at_once) {
      project_tile<In, Weight, Heads, tokens_at_once>(task, t, head);
    }
    for (; t < end; ++t) project_tile<In, Weight, Heads, 1>(task, t, head);
  }
}

template <class In, class Weight>
void project_tokens(const ScoreProjectionTask& task, std::int64_t begin, std::int64_t end) {
  std::int64_t head = 0;
  project_heads<In, Weight, heads_at_once>(task, begin, end, head);
  project_heads<In, Weight, 2>(task, begin, end, head);
  project_heads<In, Weight, 1>(task, begin, end, head);
}

template <class In>
void project_scores_item(const ScoreProjectionTask& task, std::int64_t item) {
  const std::int64_t tokens = task.batch * task.seqlen;
  const std::int64_t begin = item * projection_tokens;
  const std::int64_t end = tokens - begin < projection_tokens ? tokens : begin + projection_tokens;
  if (task.is_weight_f32) {
    project_tokens<In, F32>(task, begin, end);
  } else {
    project_tokens<In, In>(task, begin, end);
  }
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
