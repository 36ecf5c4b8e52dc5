#include "support/data.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <stdexcept>

#include "flash_dmattn/selection.h"
#include "support/buffer.h"
#include "support/random.h"
#include "support/run.h"

namespace flash_dmattn::testing {
namespace {

std::runtime_error unknown(const std::string& column, const std::string& word) {
  return std::runtime_error("no " + column + " '" + word + "'");
}

// The first key of batch b that is not padding.
std::int64_t padding(const Problem& p, std::int64_t b) { return (b + 1) * p.seqlen_k / 7; }

void fill_inputs(const Case& c, Random& random, Data& data) {
  const auto normal = [&](double factor) {
    return [&random, factor](const Index&) { return factor * random.normal(); };
  };
  const double range = largest(data.q.element());
  const auto uniform = [&](const Index&) { return range * (2 * random.uniform() - 1); };
  const auto zero = [](const Index&) { return 0.0; };
  data.dout.fill(normal(1));
  data.v.fill(normal(1));
  if (c.inputs == "normal" || c.inputs == "equal") {
    data.q.fill(normal(1));
    data.k.fill(normal(1));
  } else if (c.inputs == "extreme") {
    data.q.fill(normal(30));
    data.k.fill(normal(30));
  } else if (c.inputs == "limits") {
    for (Tensor* tensor : {&data.q, &data.k, &data.v}) tensor->fill(uniform);
  } else if (c.inputs == "zero") {
    for (Tensor* tensor : {&data.q, &data.k, &data.v}) tensor->fill(zero);
  } else {
    throw unknown("inputs", c.inputs);
  }
  if (c.inputs == "equal") {
    data.k.fill([&](const Index& i) { return data.k.get({i[0], 0, i[2], i[3]}); });
  }
}

// The value of a mask element, for the fills that decide each element separately.
std::function<bool(const Index&)> mask_values(const Case& c, Random& random) {
  const Problem& p = c.problem;
  if (c.mask_fill == "full") return [](const Index&) { return true; };
  if (c.mask_fill == "none" || c.mask_fill == "topk") return [](const Index&) { return false; };
  if (c.mask_fill == "random") return [&](const Index&) { return random.uniform() < 0.6; };
  if (c.mask_fill == "rows") {
    return [&](const Index& i) { return random.uniform() < 0.6 && i[2] % 3 != 1; };
  }
  if (c.mask_fill == "padding_left") {
    return [&](const Index& i) { return i[3] >= padding(p, i[0]); };
  }
  if (c.mask_fill == "padding_right") {
    return [&](const Index& i) { return i[3] < p.seqlen_k - padding(p, i[0]); };
  }
  if (c.mask_fill != "blocks") throw unknown("mask_fill", c.mask_fill);
  return [&](const Index& i) {
    const std::int64_t block = i[0] + i[1] + i[2] / 128 + i[3] / 128;
    return Random(c.seed + static_cast<std::uint64_t>(block)).uniform() < 0.5;
  };
}

void fill_mask(const Case& c, Random& random, Data& data) {
  const auto value = mask_values(c, random);
  data.mask.fill([&](const Index& i) { return value(i) ? 1.0 : 0.0; });
  const Shape& shape = data.mask.shape();
  if (c.mask_fill == "blocks") {
    data.mask.set({random.below(shape[0]), random.below(shape[1]), random.below(shape[2]),
                   random.below(shape[3])},
                  1);
  }
  if (c.mask_fill != "topk") return;
  for (std::int64_t row = 0; row < shape[0] * shape[1] * shape[2]; ++row) {
    for (std::int64_t n = 0; n < c.window; ++n) {
      data.mask.set({row / shape[2] / shape[1], row / shape[2] % shape[1], row % shape[2],
                     random.below(shape[3])},
                    1);
    }
  }
}

void fill_bias(const Case& c, Random& random, Data& data) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const double lowest = -largest(data.bias.element());
  const auto with = [&](double special) {
    return [&random, special](const Index&) {
      const double value = random.normal();
      return random.uniform() < 0.3 ? special : value;
    };
  };
  if (c.bias_fill == "normal") {
    data.bias.fill([&](const Index&) { return random.normal(); });
  } else if (c.bias_fill == "equal") {
    data.bias.fill([](const Index&) { return 0.5; });
  } else if (c.bias_fill == "large") {
    data.bias.fill([&](const Index&) { return 1000 * random.normal(); });
  } else if (c.bias_fill == "finfo_min") {
    data.bias.fill(with(lowest));
  } else if (c.bias_fill == "inf") {
    data.bias.fill(with(-infinity));
  } else if (c.bias_fill == "nan") {
    data.bias.fill(with(std::numeric_limits<double>::quiet_NaN()));
  } else if (c.bias_fill == "all_masked") {
    data.bias.fill([&](const Index&) { return lowest; });
  } else if (c.bias_fill == "low") {
    data.bias.fill([&](const Index&) {
      const double value = random.normal();
      const double u = random.uniform();
      return u < 0.1 ? -2e4 : u < 0.2 ? -65504.0 : u < 0.3 ? -1e29 : value;
    });
  } else if (c.bias_fill == "all_low") {
    data.bias.fill([&](const Index&) { return -2e4 + random.normal(); });
  } else {
    throw unknown("bias_fill", c.bias_fill);
  }
}

SelectionRule rule_of(const Case& c) {
  SelectionRule rule;
  rule.window = c.window;
  rule.selection = c.intervals == "global" ? Selection::global : Selection::per_query;
  if (c.rule == "none") return rule;
  rule.recent_window = 24;
  rule.sink_tokens = 3;
  rule.recent_competes = c.rule != "delayed";
  if (c.rule == "threshold") {
    rule.window = every_key;
    rule.score_threshold = 1;
  } else if (c.rule != "recent" && c.rule != "delayed") {
    throw unknown("rule", c.rule);
  }
  return rule;
}

void select(const Case& c, Random& random, Data& data) {
  const Problem& p = c.problem;
  std::vector<float> scores(data.intervals.size());
  for (float& score : scores) score = static_cast<float>(random.below(64)) / 16;
  SelectionArgs args;
  args.batch = p.intervals_shape[0];
  args.heads = p.intervals_shape[1];
  args.seqlen_q = p.seqlen_q;
  args.seqlen_k = p.seqlen_k;
  args.rule = rule_of(c);
  args.causal = p.causal;
  args.scores = scores.data();
  args.scores_dtype = DType::f32;
  args.intervals = data.intervals.data();
  run_in_new_workspace(SelectCall(args, sequential_execution(1)));
}

// A random end of an interval. Three of six are ordinary, and three are far from the queries.
std::int64_t end_outside(Random& random, std::int64_t seqlen_q) {
  using Limits = std::numeric_limits<std::int32_t>;
  switch (random.below(6)) {
    case 0: return Limits::min() + random.below(seqlen_q + 1);
    case 1: return Limits::max() - random.below(seqlen_q + 1);
    case 2: return -1 - random.below(seqlen_q + 1);
    default: return random.below(seqlen_q + 1);
  }
}

void fill_intervals(const Case& c, Random& random, Data& data) {
  const Problem& p = c.problem;
  if (c.intervals == "per_query" || c.intervals == "global") return select(c, random, data);
  const std::int64_t shift = p.seqlen_k - p.seqlen_q;  // position of query 0
  for (std::size_t n = 0; n < data.intervals.size(); ++n) {
    const std::int64_t j = static_cast<std::int64_t>(n) % p.seqlen_k;
    const std::int64_t b = static_cast<std::int64_t>(n) / p.seqlen_k / p.intervals_shape[1];
    std::int64_t first = 0;
    std::int64_t last = p.seqlen_q;
    if (c.intervals == "sliding") {
      first = j - shift;
      last = j + c.window - shift;
    } else if (c.intervals == "packed") {
      first = j / c.window * c.window - shift;
      last = first + c.window;
    } else if (c.intervals == "prefix") {
      first = j < c.window ? 0 : j - shift;
    } else if (c.intervals == "padding_left") {
      if (j < padding(p, b)) last = 0;
    } else if (c.intervals == "random") {
      first = random.below(p.seqlen_q + 1);
      last = random.below(p.seqlen_q + 1);
    } else if (c.intervals == "outside") {
      first = end_outside(random, p.seqlen_q);
      last = end_outside(random, p.seqlen_q);
    } else {
      throw unknown("intervals", c.intervals);
    }
    if (c.intervals != "outside") {
      first = std::clamp<std::int64_t>(first, 0, p.seqlen_q);
      last = std::clamp<std::int64_t>(last, 0, p.seqlen_q);
    }
    data.intervals[n] = {static_cast<std::int32_t>(first), static_cast<std::int32_t>(last)};
  }
}

}  // namespace

Data::Data(const Problem& p, Layout data_layout)
    : problem(p),
      layout(data_layout),
      q("q", element_of(p.dtype), {p.batch, p.seqlen_q, p.heads_q, p.head_dim}, layout),
      k("k", element_of(p.dtype), {p.batch, p.seqlen_k, p.heads_kv, p.head_dim}, layout),
      v("v", element_of(p.dtype), {p.batch, p.seqlen_k, p.heads_kv, value_dim_of(p)}, layout),
      mask("mask", Element::u8, p.mask_shape, layout, true),
      bias("bias", element_of(p.bias_dtype), p.bias_shape, layout, true),
      dout("dout", element_of(p.dtype), {p.batch, p.seqlen_q, p.heads_q, value_dim_of(p)}, layout),
      intervals(
          static_cast<std::size_t>(p.intervals_shape[0] * p.intervals_shape[1] * p.seqlen_k)) {}

Data::Data(const Case& c) : Data(c.problem, c.layout) {
  Random random(c.seed);
  fill_inputs(c, random, *this);
  if (has_mask()) fill_mask(c, random, *this);
  if (has_bias()) fill_bias(c, random, *this);
  if (has_intervals()) fill_intervals(c, random, *this);
  if (c.has_dlse) {
    add_dlse();
    dlse.fill([&](const Index&) { return random.normal(); });
  }
}

void Data::add_dlse() {
  const Element element = problem.dtype == DType::f64 ? Element::f64 : Element::f32;
  dlse = Tensor("dlse", element, {problem.batch, problem.heads_q, problem.seqlen_q, 1});
}

ConstRowValues Data::dlse_values() const {
  if (!has_dlse()) return nullptr;
  if (dlse.element() == Element::f64) return dlse.data<double>();
  return dlse.data<float>();
}

KeyIntervals Data::intervals_view() const {
  if (!has_intervals()) return {};
  const auto [batch, heads] = problem.intervals_shape;
  return {intervals.data(), batch == 1 ? 0 : heads * problem.seqlen_k,
          heads == 1 ? 0 : problem.seqlen_k};
}

Inputs Data::inputs() const {
  Inputs in;
  in.q = q.const_view();
  in.k = k.const_view();
  in.v = v.const_view();
  if (has_mask()) in.mask = mask.const_view();
  if (has_bias()) in.bias = bias.const_view();
  in.visibility.intervals = intervals_view();
  return in;
}

double Data::broadcast(const Tensor& tensor, std::int64_t batch, std::int64_t head,
                       std::int64_t query, std::int64_t key) const {
  const bool per_query_head = tensor.shape()[1] == problem.heads_q;
  const std::int64_t group = problem.heads_q / problem.heads_kv;
  return tensor.get_broadcast({batch, per_query_head ? head : head / group, query, key});
}

bool Data::biased(std::int64_t query, std::int64_t key) const {
  const std::int64_t age = query + problem.seqlen_k - problem.seqlen_q - key;
  return has_bias() && (problem.bias_delay == 0 || age >= problem.bias_delay);
}

bool Data::visible(std::int64_t batch, std::int64_t head, std::int64_t query,
                   std::int64_t key) const {
  const std::int64_t position = query + problem.seqlen_k - problem.seqlen_q;
  if (problem.causal && key > position) return false;
  if (has_mask() && broadcast(mask, batch, head, query, key) == 0) return false;
  if (biased(query, key) &&
      !(broadcast(bias, batch, head, query, key) > mask_value(problem.bias_dtype))) {
    return false;
  }
  if (!has_intervals()) return true;
  const KeyIntervals view = intervals_view();
  const std::int64_t kv_head = head / (problem.heads_q / problem.heads_kv);
  const KeyInterval interval =
      view.data[batch * view.stride_batch + kv_head * view.stride_head + key];
  return interval.first <= query && query < interval.last;
}

Data Data::to_f64() const {
  Problem wide = problem;
  wide.dtype = DType::f64;
  wide.bias_dtype = DType::f64;
  Data result(wide);
  result.q.fill(elements_of(q));
  result.k.fill(elements_of(k));
  result.v.fill(elements_of(v));
  result.dout.fill(elements_of(dout));
  result.mask.fill(elements_of(mask));
  result.bias.fill([&](const Index& index) {
    const double value = bias.get(index);
    return value > mask_value(problem.bias_dtype) ? value
                                                  : -std::numeric_limits<double>::infinity();
  });
  result.intervals = intervals;
  if (has_dlse()) {
    result.add_dlse();
    result.dlse.fill(elements_of(dlse));
  }
  return result;
}

}  // namespace flash_dmattn::testing
