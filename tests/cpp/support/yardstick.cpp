#include "support/yardstick.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/float_types.h"

namespace flash_dmattn::testing {
namespace {

using Vector = std::vector<float>;

constexpr float infinity = std::numeric_limits<float>::infinity();

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

double square(double x) { return x * x; }

double norm(const float* x, std::int64_t size, std::int64_t stride) {
  double sum = 0;
  for (std::int64_t n = 0; n < size; ++n) sum += square(double{x[n * stride]});
  return std::sqrt(sum);
}

// A range that covers the keys that a query row sees.
struct KeyRange {
  std::int64_t begin, end;
};

// One kv head of k or v. Every sum runs in the order of its terms, and the two layouts let the compiler
// compute many such sums at once. Values are finite, so a weight of 0 adds nothing.
struct Keys {
  std::int64_t count, dim;
  Vector values;          // [D, Sk]
  Vector rows, gradient;  // [Sk, D]; rows holds the values
  double largest_norm = 0;
  double largest_value = 0;

  Keys(const Tensor& tensor, std::int64_t batch, std::int64_t head)
      : count(tensor.shape()[1]), dim(tensor.shape()[3]) {
    values.resize(index(count * dim));
    rows.resize(index(count * dim));
    gradient.resize(index(count * dim), 0.0f);
    for (std::int64_t j = 0; j < count; ++j) {
      for (std::int64_t d = 0; d < dim; ++d) {
        const auto value = static_cast<float>(tensor.get({batch, j, head, d}));
        values[index(d * count + j)] = rows[index(j * dim + d)] = value;
      }
      largest_norm = std::max(largest_norm, norm(values.data() + j, dim, count));
    }
    for (const float x : values) largest_value = std::max(largest_value, std::abs(double{x}));
  }

  // result_j = row . key_j
  void dot(KeyRange keys, const Vector& row, Vector& result) const {
    std::fill(result.begin() + keys.begin, result.begin() + keys.end, 0.0f);
    for (std::int64_t d = 0; d < dim; ++d) {
      const float x = row[index(d)];
      const float* value = values.data() + d * count;
      for (std::int64_t j = keys.begin; j < keys.end; ++j) result[index(j)] += x * value[j];
    }
  }

  // result = sum_j weight_j key_j
  void sum(KeyRange keys, const Vector& weights, Vector& result) const {
    std::fill(result.begin(), result.end(), 0.0f);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      const float weight = weights[index(j)];
      if (weight == 0) continue;
      const float* row = rows.data() + j * dim;
      for (std::int64_t d = 0; d < dim; ++d) result[index(d)] += weight * row[d];
    }
  }

  void add_to_gradient(KeyRange keys, const Vector& weights, const Vector& row) {
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      const float weight = weights[index(j)];
      if (weight == 0) continue;
      float* sums = gradient.data() + j * dim;
      for (std::int64_t d = 0; d < dim; ++d) sums[d] += weight * row[index(d)];
    }
  }

  void store_gradient(std::int64_t batch, std::int64_t head, Tensor& tensor) const {
    for (std::int64_t j = 0; j < count; ++j) {
      for (std::int64_t d = 0; d < dim; ++d) {
        tensor.set({batch, j, head, d}, static_cast<double>(gradient[index(j * dim + d)]));
      }
    }
  }
};

class Computation {
 public:
  Computation(const Data& data, Yardstick& yardstick)
      : data_(data),
        p_(data.problem),
        element_(data.q.element()),
        scale_(static_cast<float>(data.problem.scale)),
        softcap_(static_cast<float>(data.problem.softcap)),
        y_(yardstick),
        scores_(index(p_.seqlen_k)),
        slopes_(index(p_.seqlen_k)),
        probabilities_(index(p_.seqlen_k)),
        ds_(index(p_.seqlen_k)),
        dbias_(index(data.bias.elements())),
        dbias_variance_(index(data.bias.elements())) {}

  void run() {
    const std::int64_t group = p_.heads_kv == 0 ? 0 : p_.heads_q / p_.heads_kv;
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      for (std::int64_t h = 0; h < p_.heads_kv; ++h) {
        Keys k(data_.k, b, h);
        Keys v(data_.v, b, h);
        dk_variance_.assign(index(p_.seqlen_k), 0);
        dv_variance_.assign(index(p_.seqlen_k), 0);
        for (std::int64_t g = 0; g < group; ++g) {
          for (std::int64_t i = 0; i < p_.seqlen_q; ++i) row(b, h * group + g, i, k, v);
        }
        k.store_gradient(b, h, y_.results.dk);
        v.store_gradient(b, h, y_.results.dv);
        for (const double variance : dk_variance_) y_.dk.add(std::sqrt(variance));
        for (const double variance : dv_variance_) y_.dv.add(std::sqrt(variance));
      }
    }
    y_.results.dbias.fill([&](const Index& i) { return double{dbias_[bias_index(i)]}; });
    for (const double variance : dbias_variance_) y_.dbias.add(std::sqrt(variance));
  }

 private:
  float round(float x) const {
    switch (element_) {
      case Element::bf16: return bf16_to_float(float_to_bf16(x));
      case Element::f16: return f16_to_float(float_to_f16(x));
      default: return x;
    }
  }

  // A score that is added to a wider bias has the bias's precision.
  float round_score(float x) const {
    return data_.has_bias() && data_.bias.element() == Element::f32 ? x : round(x);
  }

  std::size_t bias_index(const Index& i) const {
    const Shape& shape = data_.bias.shape();
    Index at{};
    for (std::size_t dim = 0; dim < 4; ++dim) at[dim] = shape[dim] == 1 ? 0 : i[dim];
    return index(((at[0] * shape[1] + at[1]) * shape[2] + at[2]) * shape[3] + at[3]);
  }

  Vector load_row(const Tensor& tensor, std::int64_t b, std::int64_t h, std::int64_t i) const {
    const std::int64_t dim = tensor.shape()[3];
    Vector row(index(dim));
    for (std::int64_t d = 0; d < dim; ++d) {
      row[index(d)] = static_cast<float>(tensor.get({b, i, h, d}));
    }
    return row;
  }

  void store_row(Tensor& tensor, std::int64_t b, std::int64_t h, std::int64_t i,
                 const Vector& row) const {
    for (std::int64_t d = 0; d < tensor.shape()[3]; ++d) {
      tensor.set({b, i, h, d}, static_cast<double>(row[index(d)]));
    }
  }

  KeyRange visible_keys(std::int64_t b, std::int64_t h, std::int64_t i) const {
    KeyRange keys{0, p_.seqlen_k};
    while (keys.begin < keys.end && !data_.visible(b, h, i, keys.begin)) ++keys.begin;
    while (keys.begin < keys.end && !data_.visible(b, h, i, keys.end - 1)) --keys.end;
    return keys;
  }

  // Computes scores_, with -inf where a key is not visible, and slopes_.
  void score(KeyRange keys, std::int64_t b, std::int64_t h, std::int64_t i) {
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      if (!data_.visible(b, h, i, j)) {
        scores_[index(j)] = -infinity;
        continue;
      }
      float s = round(round(scores_[index(j)]) * scale_);
      float slope = 1;
      if (softcap_ > 0) {
        const float tanh = round(std::tanh(round(s / softcap_)));
        slope = round(1 - tanh * tanh);
        s = round(tanh * softcap_);
      }
      if (data_.biased(i, j)) {
        s = round_score(s + static_cast<float>(data_.broadcast(data_.bias, b, h, i, j)));
      }
      scores_[index(j)] = s;
      slopes_[index(j)] = slope;
    }
  }

  void row(std::int64_t b, std::int64_t h, std::int64_t i, Keys& k, Keys& v) {
    const KeyRange keys = visible_keys(b, h, i);
    const Vector q = load_row(data_.q, b, h, i);
    k.dot(keys, q, scores_);
    score(keys, b, h, i);
    float max = -infinity;
    for (std::int64_t j = keys.begin; j < keys.end; ++j) max = std::max(max, scores_[index(j)]);
    const bool empty = max == -infinity;
    float sum = 0;
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      probabilities_[index(j)] = empty ? 0 : std::exp(scores_[index(j)] - max);
      sum += probabilities_[index(j)];
    }
    const float lse = empty ? -infinity : max + std::log(sum);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      float& probability = probabilities_[index(j)];
      probability = empty ? 0 : round(probability / sum);
    }
    Vector out(index(v.dim));
    v.sum(keys, probabilities_, out);
    store_row(y_.results.out, b, h, i, out);
    y_.results.lse.set({b, h, i, 0}, static_cast<double>(lse));

    const Vector dout = load_row(data_.dout, b, h, i);
    v.dot(keys, dout, ds_);
    float delta = 0;
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      ds_[index(j)] = round(ds_[index(j)]);
      delta += probabilities_[index(j)] * ds_[index(j)];
    }
    if (data_.has_dlse()) delta -= static_cast<float>(data_.dlse.get({b, h, i, 0}));
    v.add_to_gradient(keys, probabilities_, dout);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      ds_[index(j)] = round_score(probabilities_[index(j)] * (ds_[index(j)] - delta));
    }
    add_noise(keys, b, h, i, q, dout, out, k, v, lse);
    const std::size_t bias_row = index_of_row(b, h, i);
    const bool bias_per_key = p_.bias_shape[3] > 1;
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      float& ds = ds_[index(j)];
      if (data_.biased(i, j)) dbias_[bias_row + index(bias_per_key ? j : 0)] += ds;
      ds = round(round(ds * slopes_[index(j)]) * scale_);
    }
    k.add_to_gradient(keys, ds_, q);
    Vector dq(index(p_.head_dim));
    k.sum(keys, ds_, dq);
    store_row(y_.results.dq, b, h, i, dq);
  }

  // The index where the sums of a query's bias begin. Key j has the j-th sum, or all keys share the first.
  std::size_t index_of_row(std::int64_t b, std::int64_t h, std::int64_t i) const {
    if (!data_.has_bias()) return 0;
    const bool per_query_head = p_.bias_shape[1] == p_.heads_q;
    return bias_index({b, per_query_head ? h : h / (p_.heads_q / p_.heads_kv), i, 0});
  }

  // Adds the errors of one row to first order, independent errors by their squares. A score is a sum of
  // products in fp32, and its absolute error is the relative error of its probability. ds = p (dp - delta)
  // cancels two such sums, and delta comes from an `out` that was rounded to the dtype, which is an error
  // that all keys of the row share.
  void add_noise(KeyRange keys, std::int64_t b, std::int64_t h, std::int64_t i, const Vector& q,
                 const Vector& dout, const Vector& out, const Keys& k, const Keys& v, float lse) {
    const double scale = std::abs(p_.scale);
    const double dims = std::sqrt(static_cast<double>(k.dim));
    const double value_dims = std::sqrt(static_cast<double>(v.dim));
    const double score = scale * norm(q.data(), k.dim, 1) * k.largest_norm / dims +
                         (std::isfinite(lse) ? std::abs(double{lse}) : 0);
    const double relative = 2 * unit_roundoff(Element::f32) * (1 + score);
    Vector products(dout.size());
    for (std::size_t d = 0; d < dout.size(); ++d) products[d] = dout[d] * out[d];
    const double ds = 2 * relative * norm(dout.data(), v.dim, 1) * v.largest_norm / value_dims +
                      unit_roundoff(element_) * norm(products.data(), v.dim, 1);
    double largest_q = 0;
    double largest_dout = 0;
    for (const float x : q) largest_q = std::max(largest_q, std::abs(double{x}));
    for (const float x : dout) largest_dout = std::max(largest_dout, std::abs(double{x}));
    const double weight = norm(probabilities_.data() + keys.begin, keys.end - keys.begin, 1);
    y_.out.add(relative * weight * v.largest_value);
    y_.lse.add(relative);
    Vector mean_key(q.size());
    k.sum(keys, probabilities_, mean_key);
    const double shared = norm(mean_key.data(), k.dim, 1);
    y_.dq.add(ds * scale * std::max(weight * k.largest_value, shared));
    const std::size_t bias_row = index_of_row(b, h, i);
    const bool bias_per_key = p_.bias_shape[3] > 1;
    if (data_.has_bias() && !bias_per_key) dbias_variance_[bias_row] += square(ds);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      const double probability = double{probabilities_[index(j)]};
      dk_variance_[index(j)] += square(probability * ds * scale * largest_q);
      dv_variance_[index(j)] += square(probability * relative * largest_dout);
      if (bias_per_key) dbias_variance_[bias_row + index(j)] += square(probability * ds);
    }
  }

  const Data& data_;
  const Problem& p_;
  Element element_;
  float scale_, softcap_;
  Yardstick& y_;
  Vector scores_, slopes_, probabilities_, ds_;  // [Sk]; ds_ first contains dp
  Vector dbias_;                                 // as a dense array
  std::vector<double> dk_variance_, dv_variance_, dbias_variance_;
};

}  // namespace

void Noise::add(double noise) {
  max = std::max(max, noise);
  sum += noise;
  ++count;
}

Yardstick::Yardstick(const Data& data) : results(data) { Computation(data, *this).run(); }

double unit_roundoff(Element element) {
  switch (element) {
    case Element::bf16: return 0x1p-8;
    case Element::f16: return 0x1p-11;
    case Element::f32: return 0x1p-24;
    default: return 0x1p-53;
  }
}

}  // namespace flash_dmattn::testing
