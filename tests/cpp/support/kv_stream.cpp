#include "support/kv_stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <utility>

#include "common/float_types.h"
#include "support/run.h"

namespace flash_dmattn::testing {
namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();

std::array<std::int64_t, 4> by_token(std::int64_t batch, std::int64_t length, std::int64_t heads,
                                     std::int64_t head_dim) {
  return contiguous_strides({batch, length, heads, head_dim});
}

const KvCacheShape& shape_with_windows(StreamOptions& options) {
  if (!options.head_windows.empty()) {
    options.shape.rule.head_windows = options.head_windows.data();
  }
  return options.shape;
}

// Row i of the queries of kv head h in a tensor [B, n, Hq, D], and in [B, Hkv n, G, D]: where pending_inputs has them, and
// where they belong, as rows of elements.
template <class Move>
void for_each_folded(const KvCacheShape& s, std::int64_t length, std::int64_t group,
                     const Move& move) {
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t i = 0; i < length; ++i) {
      for (std::int64_t hq = 0; hq < s.heads_kv * group; ++hq) {
        const std::int64_t h = hq / group, g = hq % group;
        const std::int64_t row = (b * length + i) * s.heads_kv * group + hq;
        move(row, ((b * s.heads_kv + h) * length + i) * group + g,
             (b * s.heads_kv * group + hq) * length + i,
             (b * group + g) * s.heads_kv * length + h * length + i);
      }
    }
  }
}

}  // namespace

std::vector<KeyInterval> select_last_query(const KvCacheShape& shape, std::int64_t length,
                                           const std::vector<std::int32_t>& lengths,
                                           const float* scores, const std::uint8_t* mask) {
  const std::int64_t heads = shape.heads_kv;
  std::vector<KeyInterval> intervals(static_cast<std::size_t>(shape.batch * heads * length));
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    const std::int64_t keys = lengths[static_cast<std::size_t>(b)];
    std::vector<KeyInterval> row_intervals(static_cast<std::size_t>(heads * keys));
    const SelectionArgs selection{.batch = 1,
                                  .heads = heads,
                                  .seqlen_q = keys > 0 ? 1 : 0,
                                  .seqlen_k = keys,
                                  .rule = shape.rule,
                                  .scores = scores + b * heads * length,
                                  .scores_dtype = DType::f32,
                                  .scores_stride = {0, length, 1},
                                  .key_mask = mask + b * length,
                                  .key_mask_stride = {0, 0, 1},
                                  .intervals = row_intervals.data()};
    run_in_new_workspace(SelectCall(selection, sequential_execution(2)));
    for (std::int64_t h = 0; h < heads; ++h) {
      std::copy_n(row_intervals.begin() + h * keys, keys,
                  intervals.begin() + (b * heads + h) * length);
    }
  }
  return intervals;
}

KvStream::KvStream(const StreamOptions& options)
    : options_(options),
      random_(options.seed),
      memory_(kv_cache_size(shape_with_windows(options_)), "cache"),
      other_memory_(memory_.size(), "other cache"),
      cache_(kv_cache_in(memory_, options_.shape)),
      committed_(static_cast<std::size_t>(options.shape.batch)),
      pending_tokens_(committed_.size()) {
  clear_cache(cache_, sequential_execution(1), options.backend);
}

KvStream::Input KvStream::draw(std::int64_t length) {
  const KvCacheShape& s = options_.shape;
  Input input{.length = length};
  input.tokens.resize(committed_.size());
  const auto numbers = [&](std::vector<std::byte>& to, std::int64_t count) {
    to.resize(static_cast<std::size_t>(count * size_of(s.dtype)));
    for (std::int64_t i = 0; i < count; ++i) store(to.data(), s.dtype, i, random_.normal());
  };
  numbers(input.q, s.batch * length * s.heads_kv * options_.group * s.head_dim);
  numbers(input.k, s.batch * length * s.heads_kv * s.head_dim);
  numbers(input.v, s.batch * length * s.heads_kv * value_dim_of(s));
  input.scores.resize(static_cast<std::size_t>(s.batch * s.heads_kv * length));
  for (float& score : input.scores) {
    score = options_.scores == StreamScores::equal ? 0.5f : static_cast<float>(random_.normal());
    if (options_.scores == StreamScores::ties) score = std::round(score);
    if (random_.uniform() < options_.nan_share) score = nan;
  }
  input.mask.resize(static_cast<std::size_t>(s.batch * length));
  for (std::uint8_t& visible : input.mask) visible = random_.uniform() >= options_.masked_share;

  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t t = 0; t < length; ++t) {
      Token token;
      const auto read = [&](const std::vector<std::byte>& from, std::int64_t columns) {
        std::vector<double> row;
        for (std::int64_t i = 0; i < s.heads_kv * columns; ++i) {
          row.push_back(load(from.data(), s.dtype, (b * length + t) * s.heads_kv * columns + i));
        }
        return row;
      };
      token.k = read(input.k, s.head_dim);
      token.v = read(input.v, value_dim_of(s));
      for (std::int64_t h = 0; h < s.heads_kv; ++h) {
        const auto at = static_cast<std::size_t>((b * s.heads_kv + h) * length + t);
        token.scores.push_back(input.scores[at]);
      }
      token.is_present = input.mask[static_cast<std::size_t>(b * length + t)] != 0;
      input.tokens[static_cast<std::size_t>(b)].push_back(token);
    }
  }
  return input;
}

std::vector<std::size_t> KvStream::competing(const std::vector<Token>& past, std::int64_t h) const {
  const SelectionRule& rule = options_.shape.rule;
  const auto score = [&](std::size_t j) { return past[j].scores[static_cast<std::size_t>(h)]; };
  const std::int64_t delay = rule.recent_competes ? 0 : rule.recent_window;
  const bool has_window = rule.head_windows == nullptr || rule.head_windows[h] > 0;
  std::vector<std::size_t> keys;
  std::int64_t present = 0;
  for (std::size_t j = 0; j < past.size(); ++j) {
    if (!past[j].is_present || present++ < rule.sink_tokens) continue;
    const auto age = static_cast<std::int64_t>(past.size() - 1 - j);
    if (has_window && rule.window > 0 && age >= delay && double{score(j)} >= rule.score_threshold) {
      keys.push_back(j);
    }
  }
  std::sort(keys.begin(), keys.end(), [&](std::size_t a, std::size_t b) {
    return score(a) > score(b) || (score(a) == score(b) && a > b);
  });
  return keys;
}

std::vector<std::size_t> KvStream::visible(const std::vector<Token>& past, std::int64_t h) const {
  const SelectionRule& rule = options_.shape.rule;
  const auto window = static_cast<std::size_t>(options_.shape.window(h));
  std::vector<std::size_t> keys = competing(past, h);
  keys.resize(std::min(keys.size(), window));
  std::set<std::size_t> seen(keys.begin(), keys.end());
  std::int64_t present = 0;
  for (std::size_t j = 0; j < past.size(); ++j) {
    const auto age = static_cast<std::int64_t>(past.size() - 1 - j);
    if (!past[j].is_present) continue;
    if (present++ < rule.sink_tokens || age < rule.recent_window) seen.insert(j);
  }
  return {seen.begin(), seen.end()};
}

void KvStream::expect_row(const Input& input, std::int64_t b, std::int64_t i,
                          const std::vector<Token>& past, const std::vector<std::byte>& out,
                          const std::vector<float>& lse) const {
  const KvCacheShape& s = options_.shape;
  const double scale = default_scale(s.head_dim);
  const double tolerance = s.dtype == DType::f32 ? 2e-5 : s.dtype == DType::f16 ? 4e-3 : 3e-2;
  const std::int64_t heads_q = s.heads_kv * options_.group;
  for (std::int64_t hq = 0; hq < heads_q; ++hq) {
    const std::int64_t h = hq / options_.group;
    std::vector<std::size_t> keys = visible(past, h);
    if (options_.use == ScoreUse::choose_and_bias) {  // a bias that is NaN masks
      std::erase_if(keys, [&](std::size_t j) {
        return std::isnan(past[j].scores[static_cast<std::size_t>(h)]);
      });
    }
    const std::int64_t query = ((b * input.length + i) * heads_q + hq) * s.head_dim;
    std::vector<double> weights;
    double max = -std::numeric_limits<double>::infinity(), sum = 0;
    for (const std::size_t j : keys) {
      double score = 0;
      for (std::int64_t d = 0; d < s.head_dim; ++d) {
        score += load(input.q.data(), s.dtype, query + d) *
                 past[j].k[static_cast<std::size_t>(h * s.head_dim + d)];
      }
      score *= scale;
      if (options_.softcap > 0) {
        score = options_.softcap * std::tanh(score / options_.softcap);
      }
      if (options_.use == ScoreUse::choose_and_bias) {
        score += static_cast<double>(past[j].scores[static_cast<std::size_t>(h)]);
      }
      weights.push_back(score);
      max = std::max(max, score);
    }
    for (double& weight : weights) sum += weight = std::exp(weight - max);
    const auto row = static_cast<std::size_t>((b * heads_q + hq) * input.length + i);
    if (keys.empty()) {
      ASSERT_EQ(lse[row], -std::numeric_limits<float>::infinity());
    } else {
      ASSERT_NEAR(static_cast<double>(lse[row]), max + std::log(sum), tolerance);
    }
    const std::int64_t columns = value_dim_of(s);
    for (std::int64_t d = 0; d < columns; ++d) {
      double expected = 0;
      for (std::size_t n = 0; n < keys.size(); ++n) {
        expected += weights[n] / sum * past[keys[n]].v[static_cast<std::size_t>(h * columns + d)];
      }
      const std::int64_t at = ((b * input.length + i) * heads_q + hq) * columns + d;
      ASSERT_NEAR(load(out.data(), s.dtype, at), expected, tolerance)
          << "row " << b << ", head " << hq << ", column " << d << ", token " << past.size();
    }
  }
}

std::vector<std::byte> KvStream::empty_out(const Input& input) const {
  const KvCacheShape& s = options_.shape;
  const std::size_t rows = input.q.size() / static_cast<std::size_t>(s.head_dim);
  return std::vector<std::byte>(rows * static_cast<std::size_t>(value_dim_of(s)), std::byte{0xff});
}

void KvStream::fill(std::int64_t length) {
  const KvCacheShape& s = options_.shape;
  const Input input = draw(length);
  std::vector<std::int32_t> lengths;
  std::vector<std::uint8_t> mask = input.mask;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    lengths.push_back(static_cast<std::int32_t>(random_.below(length + 1)));
    for (std::int64_t t = lengths.back(); t < length; ++t) {
      mask[static_cast<std::size_t>(b * length + t)] = 0;
    }
  }
  const std::vector<KeyInterval> intervals =
      select_last_query(s, length, lengths, input.scores.data(), mask.data());
  const FillArgs args{.cache = cache_,
                      .seqlen_k = length,
                      .k = {input.k.data(), by_token(s.batch, length, s.heads_kv, s.head_dim)},
                      .v = {input.v.data(), by_token(s.batch, length, s.heads_kv, value_dim_of(s))},
                      .scores = {input.scores.data()},
                      .intervals = {intervals.data()},
                      .seqlen_q = 1,
                      .lengths = lengths.data(),
                      .mask = {mask.data()}};
  fill_cache(args, sequential_execution(2), options_.backend);
  cache_.pending = 0;
  for (std::size_t b = 0; b < committed_.size(); ++b) {
    committed_[b] = input.tokens[b];
    committed_[b].resize(static_cast<std::size_t>(lengths[b]));
    pending_tokens_[b].clear();
  }
}

void KvStream::step() {
  const KvCacheShape& s = options_.shape;
  const std::int64_t heads_q = s.heads_kv * options_.group;
  const Input input = draw(1);
  std::vector<std::byte> out = empty_out(input);
  std::vector<float> lse(static_cast<std::size_t>(s.batch * heads_q), nan);
  const DecodeStepArgs args{
      .cache = cache_,
      .heads_q = heads_q,
      .scale = default_scale(s.head_dim),
      .softcap = options_.softcap,
      .score_use = options_.use,
      .q = {input.q.data(), by_token(s.batch, 1, heads_q, s.head_dim)},
      .k = {input.k.data(), by_token(s.batch, 1, s.heads_kv, s.head_dim)},
      .v = {input.v.data(), by_token(s.batch, 1, s.heads_kv, value_dim_of(s))},
      .scores = {input.scores.data()},
      .mask = {input.mask.data()},
      .out = {out.data(), by_token(s.batch, 1, heads_q, value_dim_of(s))},
      .lse = lse.data()};
  run_in_new_workspace(DecodeStepCall(args, sequential_execution(2), options_.backend));
  for (std::int64_t b = 0; b < s.batch; ++b) {
    auto& past = committed_[static_cast<std::size_t>(b)];
    past.push_back(input.tokens[static_cast<std::size_t>(b)][0]);
    ASSERT_NO_FATAL_FAILURE(expect_row(input, b, 0, past, out, lse));
  }
}

void KvStream::append(std::int64_t length) {
  const KvCacheShape& s = options_.shape;
  const std::int64_t heads_q = s.heads_kv * options_.group;
  const Input input = draw(length);
  append_tokens({.cache = cache_,
                 .seqlen = length,
                 .k = {input.k.data(), by_token(s.batch, length, s.heads_kv, s.head_dim)},
                 .v = {input.v.data(), by_token(s.batch, length, s.heads_kv, value_dim_of(s))},
                 .scores = {input.scores.data()},
                 .mask = {input.mask.data()}},
                sequential_execution(2), options_.backend);
  cache_.pending += length;

  GuardedBuffer memory(
      static_cast<std::size_t>(pending_intervals_count(cache_)) * sizeof(KeyInterval), "intervals");
  auto* const intervals = reinterpret_cast<KeyInterval*>(memory.data());
  const PendingIntervalsArgs seen{.cache = cache_, .seqlen_q = length, .intervals = intervals};
  run_in_new_workspace(PendingIntervalsCall(seen, sequential_execution(2), options_.backend));
  std::vector<std::byte> out = empty_out(input);
  std::vector<float> lse(static_cast<std::size_t>(s.batch * heads_q * length), nan);
  const bool equal = s.has_equal_heads();
  const std::int64_t rows = equal ? length : s.heads_kv * length;
  const std::int64_t heads = equal ? heads_q : options_.group;
  std::vector<std::byte> q = input.q;
  const std::int64_t q_bytes = s.head_dim * size_of(s.dtype);
  if (!equal) {
    for_each_folded(s, length, options_.group, [&](auto row, auto folded, auto, auto) {
      std::copy_n(input.q.begin() + row * q_bytes, q_bytes, q.begin() + folded * q_bytes);
    });
  }
  ForwardArgs forward_args;
  forward_args.problem =
      pending_problem(cache_, heads_q, length, default_scale(s.head_dim), options_.use);
  forward_args.problem.softcap = options_.softcap;
  forward_args.in = pending_inputs(cache_, {q.data(), by_token(s.batch, rows, heads, s.head_dim)},
                                   length, intervals, options_.use);
  forward_args.out = {out.data(), by_token(s.batch, rows, heads, value_dim_of(s))};
  forward_args.lse = lse.data();
  run_in_new_workspace(ForwardCall(forward_args, sequential_execution(2), options_.backend));
  if (!equal) {
    const std::vector<std::byte> folded_out = out;
    const std::vector<float> folded_lse = lse;
    const std::int64_t bytes = value_dim_of(s) * size_of(s.dtype);
    for_each_folded(s, length, options_.group, [&](auto row, auto folded, auto sum, auto from) {
      std::copy_n(folded_out.begin() + folded * bytes, bytes, out.begin() + row * bytes);
      lse[static_cast<std::size_t>(sum)] = folded_lse[static_cast<std::size_t>(from)];
    });
  }
  for (std::int64_t b = 0; b < s.batch; ++b) {
    auto& waiting = pending_tokens_[static_cast<std::size_t>(b)];
    std::vector<Token> past = committed_[static_cast<std::size_t>(b)];
    past.insert(past.end(), waiting.begin(), waiting.end());
    for (std::int64_t i = 0; i < length; ++i) {
      const Token& token = input.tokens[static_cast<std::size_t>(b)][static_cast<std::size_t>(i)];
      past.push_back(token);
      waiting.push_back(token);
      ASSERT_NO_FATAL_FAILURE(expect_row(input, b, i, past, out, lse));
    }
  }
}

void KvStream::commit(bool rows_differ) {
  std::vector<std::int32_t> kept;
  for (std::size_t b = 0; b < committed_.size(); ++b) {
    auto& waiting = pending_tokens_[b];
    kept.push_back(static_cast<std::int32_t>(rows_differ ? random_.below(cache_.pending + 1)
                                                         : cache_.pending));
    committed_[b].insert(committed_[b].end(), waiting.begin(), waiting.begin() + kept.back());
    waiting.clear();
  }
  const CommitArgs args{.cache = cache_, .kept_tokens = rows_differ ? kept.data() : nullptr};
  run_in_new_workspace(CommitCall(args, sequential_execution(2), options_.backend));
  cache_.pending = 0;
}

void KvStream::reorder() {
  other_memory_.poison();
  KvCache to = kv_cache_in(other_memory_, options_.shape);
  to.pending = cache_.pending;
  std::vector<std::int32_t> index;
  std::vector<std::vector<Token>> committed, waiting;
  for (std::size_t b = 0; b < committed_.size(); ++b) {
    index.push_back(static_cast<std::int32_t>(random_.below(options_.shape.batch)));
    committed.push_back(committed_[static_cast<std::size_t>(index.back())]);
    waiting.push_back(pending_tokens_[static_cast<std::size_t>(index.back())]);
  }
  clear_cache(to, sequential_execution(1), options_.backend);
  copy_rows({.from = cache_, .to = to, .index = index.data()}, sequential_execution(2),
            options_.backend);
  std::swap(memory_, other_memory_);
  cache_ = to;
  committed_ = std::move(committed);
  pending_tokens_ = std::move(waiting);
}

void KvStream::save_and_restore() {
  const std::vector<std::byte> saved(memory_.data(), memory_.data() + memory_.size());
  const auto committed = committed_, waiting = pending_tokens_;
  const std::int64_t count = cache_.pending;
  if (count == 0) {
    ASSERT_NO_FATAL_FAILURE(step());
  }
  std::memcpy(memory_.data(), saved.data(), saved.size());
  committed_ = committed;
  pending_tokens_ = waiting;
}

void KvStream::check_slots() const {
  const KvCacheShape& s = options_.shape;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    const auto& past = committed_[static_cast<std::size_t>(b)];
    ASSERT_EQ(cache_.seen[b], static_cast<std::int64_t>(past.size()));
    for (std::int64_t h = 0; h < s.heads_kv; ++h) {
      std::set<std::size_t> expected, found;
      for (const std::size_t j : visible(past, h)) expected.insert(j);
      const SlotCount& slots = cache_.counts[b * s.heads_kv + h];
      for (std::int64_t slot = 0; slot < slots.count; ++slot) {
        const std::int32_t entry = cache_.positions[b * s.total_slots() + s.first_slot(h) + slot];
        if (entry == no_key) continue;
        ASSERT_TRUE(found.insert(static_cast<std::size_t>(position_of_entry(entry))).second);
      }
      ASSERT_EQ(found, expected) << "row " << b << ", head " << h;
      ASSERT_EQ(competing(past, h).size(), static_cast<std::size_t>(slots.competed))
          << "row " << b << ", head " << h;
    }
  }
}

}  // namespace flash_dmattn::testing
