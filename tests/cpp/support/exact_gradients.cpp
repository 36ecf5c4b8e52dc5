#include "support/exact_gradients.h"

#include <algorithm>

namespace flash_dmattn::testing {

ExactGradients::ExactGradients(const Data& data) {
  const Problem& p = data.problem;
  dq.resize(static_cast<std::size_t>(p.batch * p.seqlen_q * p.heads_q * p.head_dim));
  dk.resize(static_cast<std::size_t>(p.batch * p.seqlen_k * p.heads_kv * p.head_dim));
  dv.resize(dk.size());
  dbias.resize(static_cast<std::size_t>(p.batch * p.heads_kv * p.seqlen_k));
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      for (std::int64_t i = 0; i < p.seqlen_q; ++i) add_row(data, b, h, i);
    }
  }
}

void ExactGradients::add_row(const Data& data, std::int64_t b, std::int64_t h, std::int64_t i) {
  const Problem& p = data.problem;
  const std::int64_t kv = h / (p.heads_q / p.heads_kv);
  const std::int64_t last = p.causal ? i + p.seqlen_k - p.seqlen_q : p.seqlen_k - 1;
  std::vector<double> scores;
  std::vector<Sum> dp;
  for (std::int64_t j = 0; j <= last; ++j) {
    double score = 0;
    Sum product;
    for (std::int64_t d = 0; d < p.head_dim; ++d) {
      score += data.q.get({b, i, h, d}) * data.k.get({b, j, kv, d});
      const double term = data.dout.get({b, i, h, d}) * data.v.get({b, j, kv, d});
      product.add(1, {term, std::abs(term)});
    }
    score = score * p.scale + (data.has_bias() ? data.bias.get({b, kv, 0, j}) : 0.0);
    scores.push_back(std::clamp(score, -largest(DType::f32), largest(DType::f32)));
    dp.push_back(product);
  }
  const double max = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (double& score : scores) sum += score = std::exp(score - max);
  Sum delta;
  for (std::size_t j = 0; j < dp.size(); ++j) delta.add(scores[j] / sum, dp[j]);
  for (std::size_t j = 0; j < dp.size(); ++j) {
    const auto key = static_cast<std::int64_t>(j);
    const double probability = scores[j] / sum;
    Sum ds;
    ds.add(probability, dp[j]);
    ds.add(-probability, delta);
    dbias[at({b, kv, 0, key}, p.heads_kv, 1, p.seqlen_k)].add(1, ds);
    for (std::int64_t d = 0; d < p.head_dim; ++d) {
      const double dout = data.dout.get({b, i, h, d});
      const std::size_t to = at({b, key, kv, d}, p.seqlen_k, p.heads_kv, p.head_dim);
      dv[to].add(probability, {dout, std::abs(dout)});
      dk[to].add(data.q.get({b, i, h, d}) * p.scale, ds);
      dq[at({b, i, h, d}, p.seqlen_q, p.heads_q, p.head_dim)].add(
          data.k.get({b, key, kv, d}) * p.scale, ds);
    }
  }
}

}  // namespace flash_dmattn::testing
