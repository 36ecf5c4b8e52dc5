// Generation with a KV cache of `window` keys per kv head, on random data: a prompt in chunks, then one token at a time.
// At the end the last token's result is compared with attention over the whole context.

#include <flash_dmattn/flash_dmattn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <span>
#include <vector>

#include "memory.h"

namespace fd = flash_dmattn;

namespace {

constexpr std::int64_t heads_q = 4, heads_kv = 2, head_dim = 64;
constexpr std::int64_t window = 128;  // keys that each query sees
constexpr std::int64_t chunk = 64;    // tokens of the prompt at a time
constexpr std::int64_t prompt = 1000, generated = 200;

// Applies a rotary embedding to [heads, head_dim] of the token at `position`, before the key is stored, as an engine does.
void rotate(std::span<float> heads, std::int64_t position) {
  for (std::size_t head = 0; head < heads.size(); head += head_dim) {
    for (std::size_t d = 0; d < head_dim / 2; ++d) {
      const double angle = static_cast<double>(position) *
                           std::pow(10000.0, -2.0 * static_cast<double>(d) / head_dim);
      const float x = heads[head + d];
      const float y = heads[head + d + head_dim / 2];
      const auto cosine = static_cast<float>(std::cos(angle));
      const auto sine = static_cast<float>(std::sin(angle));
      heads[head + d] = x * cosine - y * sine;
      heads[head + d + head_dim / 2] = x * sine + y * cosine;
    }
  }
}

// The projections of tokens by a model: rows one token after the other, scores [heads_kv] of each.
struct Tokens {
  std::vector<float> q, k, v, scores;
  std::int64_t length = 0;

  void add(std::mt19937& generator) {
    std::normal_distribution<float> normal;
    const auto append = [&](std::vector<float>& to, std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i) to.push_back(normal(generator));
    };
    append(q, heads_q * head_dim);
    append(k, heads_kv * head_dim);
    append(v, heads_kv * head_dim);
    append(scores, heads_kv);
    rotate(std::span(q).last(heads_q * head_dim), length);
    rotate(std::span(k).last(heads_kv * head_dim), length);
    ++length;
  }
};

constexpr auto q_stride =
    std::array{std::int64_t{0}, heads_q * head_dim, head_dim, std::int64_t{1}};
constexpr auto kv_stride =
    std::array{std::int64_t{0}, heads_kv * head_dim, head_dim, std::int64_t{1}};
constexpr auto score_stride = std::array{std::int64_t{0}, std::int64_t{1}, heads_kv};

class Decoder {
 public:
  explicit Decoder(const fd::Execution& threads)
      : threads_(threads), cache_(fd::kv_cache_in(memory_.of(fd::kv_cache_size(shape)), shape)) {
    fd::clear_cache(cache_, threads_);
  }

  static constexpr fd::KvCacheShape shape = {.batch = 1,
                                             .heads_kv = heads_kv,
                                             .rule = {.window = window},
                                             .chunk = chunk,
                                             .head_dim = head_dim,
                                             .dtype = fd::DType::f32};

  // Attention of `length` tokens from `begin` on, a part of a prompt; out [length, heads_q, head_dim].
  void prefill(const Tokens& tokens, std::int64_t begin, std::int64_t length, float* out) {
    fd::append_tokens({.cache = cache_,
                       .seqlen = length,
                       .k = {tokens.k.data() + begin * kv_stride[1], kv_stride},
                       .v = {tokens.v.data() + begin * kv_stride[1], kv_stride},
                       .scores = {tokens.scores.data() + begin * heads_kv, score_stride}},
                      threads_);
    cache_.pending += length;

    intervals_.resize(static_cast<std::size_t>(heads_kv * (window + cache_.pending)));
    lse_.resize(static_cast<std::size_t>(heads_q * length));
    const fd::PendingIntervalsArgs seen = {
        .cache = cache_, .seqlen_q = length, .intervals = intervals_.data()};
    run(fd::PendingIntervalsCall(seen, threads_));
    const fd::ForwardArgs args = {
        .problem = fd::pending_problem(cache_, heads_q, length, fd::default_scale(head_dim)),
        .in = fd::pending_inputs(cache_, {tokens.q.data() + begin * q_stride[1], q_stride}, length,
                                 intervals_.data()),
        .out = {out, q_stride},
        .lse = lse_.data()};
    run(fd::ForwardCall(args, threads_));

    run(fd::CommitCall({.cache = cache_}, threads_));
    cache_.pending = 0;
  }

  // The token at `index` enters, the worst key leaves, and its query attends; out [heads_q, head_dim].
  void step(const Tokens& tokens, std::int64_t index, float* out) {
    lse_.resize(heads_q);
    const fd::DecodeStepArgs args = {
        .cache = cache_,
        .heads_q = heads_q,
        .scale = fd::default_scale(head_dim),
        .q = {tokens.q.data() + index * q_stride[1], q_stride},
        .k = {tokens.k.data() + index * kv_stride[1], kv_stride},
        .v = {tokens.v.data() + index * kv_stride[1], kv_stride},
        .scores = {tokens.scores.data() + index * heads_kv, score_stride},
        .out = {out, q_stride},
        .lse = lse_.data()};
    run(fd::DecodeStepCall(args, threads_));
  }

  std::int64_t seen() const { return cache_.seen[0]; }

 private:
  template <class Args>
  void run(const fd::CheckedCall<Args>& call) {
    call.run(workspace_.of(call.workspace_size()));
  }

  fd::Execution threads_;
  Memory memory_, workspace_;
  fd::KvCache cache_;
  std::vector<fd::KeyInterval> intervals_;
  std::vector<float> lse_;
};

// Computes the last token's result by definition: softmax over the `window` best keys of each head.
std::vector<double> full_attention(const Tokens& tokens) {
  std::vector<double> out(heads_q * head_dim);
  for (std::int64_t head = 0; head < heads_q; ++head) {
    const std::int64_t of = head / (heads_q / heads_kv);
    const auto score = [&](std::int64_t j) {
      return tokens.scores[static_cast<std::size_t>(j * heads_kv + of)];
    };
    std::vector<std::int64_t> keys(static_cast<std::size_t>(tokens.length));
    for (std::size_t j = 0; j < keys.size(); ++j) keys[j] = static_cast<std::int64_t>(j);
    std::sort(keys.begin(), keys.end(),
              [&](std::int64_t a, std::int64_t b) { return score(a) > score(b); });
    keys.resize(std::min<std::size_t>(keys.size(), window));
    const float* q = tokens.q.data() + ((tokens.length - 1) * heads_q + head) * head_dim;
    double sum = 0;
    for (const std::int64_t j : keys) {
      const auto at = static_cast<std::size_t>((j * heads_kv + of) * head_dim);
      double dot = 0;
      for (std::size_t d = 0; d < head_dim; ++d) {
        dot += static_cast<double>(q[d]) * static_cast<double>(tokens.k[at + d]);
      }
      const double weight = std::exp(dot / std::sqrt(double{head_dim}) + double{score(j)});
      sum += weight;
      for (std::size_t d = 0; d < head_dim; ++d) {
        out[static_cast<std::size_t>(head * head_dim) + d] +=
            weight * static_cast<double>(tokens.v[at + d]);
      }
    }
    for (std::size_t d = 0; d < head_dim; ++d) {
      out[static_cast<std::size_t>(head * head_dim) + d] /= sum;
    }
  }
  return out;
}

bool run() {
  std::mt19937 generator(0);
  fd::ThreadPool pool;
  Decoder decoder(pool.execution());
  Tokens tokens;
  std::vector<float> out(heads_q * head_dim * chunk);

  while (tokens.length < prompt) tokens.add(generator);
  for (std::int64_t begin = 0; begin < prompt; begin += chunk) {
    decoder.prefill(tokens, begin, std::min(chunk, prompt - begin), out.data());
  }
  for (std::int64_t i = 0; i < generated; ++i) {
    tokens.add(generator);  // of the token that was sampled
    decoder.step(tokens, tokens.length - 1, out.data());
  }

  double largest = 0;
  const std::vector<double> expected = full_attention(tokens);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(out[i]) - expected[i]));
  }
  std::printf("%lld tokens seen, a cache of %zu bytes, largest error of the last one %.1e\n",
              static_cast<long long>(decoder.seen()), fd::kv_cache_size(Decoder::shape), largest);
  return decoder.seen() == prompt + generated && largest < 1e-5;
}

}  // namespace

int main() {
  try {
    return run() ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
