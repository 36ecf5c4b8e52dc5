#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "flash_dmattn/flash_dmattn.h"
#include "support/buffer.h"
#include "support/random.h"

// A KV cache and its definition: for a random stream of tokens, every query's result is compared with full attention
// over the keys that the rule shows of all before it.
namespace flash_dmattn::testing {

// The keys of a prompt that the last query of each row sees, as intervals [B, Hkv, length] of that one query. Rows end at
// different positions, so each is a selection of its own. Scores are [B, Hkv, length], the mask is [B, length].
std::vector<KeyInterval> select_last_query(const KvCacheShape& shape, std::int64_t length,
                                           const std::vector<std::int32_t>& lengths,
                                           const float* scores, const std::uint8_t* mask);

enum class StreamScores : std::uint8_t { normal, ties, equal };

struct StreamOptions {
  KvCacheShape shape{};
  std::vector<std::int64_t> head_windows;  // of the rule; empty: there are none
  std::int64_t group = 1;
  StreamScores scores = StreamScores::normal;
  double nan_share = 0;     // of scores
  double masked_share = 0;  // of tokens
  double softcap = 0;
  ScoreUse use = ScoreUse::choose_and_bias;
  std::uint64_t seed = 0;
  std::string_view backend;
};

class KvStream {
 public:
  explicit KvStream(const StreamOptions& options);

  // Each function calls the library and fails the running test where a result differs.
  void fill(std::int64_t length);    // fills rows of different lengths
  void step();                       // decodes one token of every row
  void append(std::int64_t length);  // appends, and attends
  void commit(bool rows_differ);     // commits a random number of the pending tokens
  void reorder();                    // reorders the batch through a second cache
  void save_and_restore();           // saves and restores the bytes of the cache
  void check_slots()
      const;  // expects the keys that the last token sees in the slots, and no others

  std::int64_t pending() const { return cache_.pending; }
  Random& random() { return random_; }

 private:
  struct Token {
    std::vector<double> k, v;   // [Hkv, D] and [Hkv, Dv], as stored
    std::vector<float> scores;  // [Hkv]
    bool is_present = true;     // not masked
  };
  // Tokens of every row, in the form that the library takes.
  struct Input {
    std::int64_t length;
    std::vector<std::byte> q, k, v;
    std::vector<float> scores;
    std::vector<std::uint8_t> mask;
    std::vector<std::vector<Token>> tokens;  // [B][length]
  };

  Input draw(std::int64_t length);
  // Memory for the results of its queries.
  std::vector<std::byte> empty_out(const Input& input) const;
  // Checks the result of query i of `input` at the end of `past`.
  void expect_row(const Input& input, std::int64_t b, std::int64_t i,
                  const std::vector<Token>& past, const std::vector<std::byte>& out,
                  const std::vector<float>& lse) const;
  // The keys of `past` that compete for the query of its last token, from the best on, and those that it sees.
  std::vector<std::size_t> competing(const std::vector<Token>& past, std::int64_t h) const;
  std::vector<std::size_t> visible(const std::vector<Token>& past, std::int64_t h) const;

  StreamOptions options_;
  Random random_;
  GuardedBuffer memory_, other_memory_;
  KvCache cache_;
  std::vector<std::vector<Token>> committed_, pending_tokens_;  // [B]
};

}  // namespace flash_dmattn::testing
