#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "device.h"
#include "least_bound.h"

// A choice of keys on the device: the intervals of a case, or ranks, for which tests/cases has no words.
namespace flash_dmattn::testing {

enum class KeyChoice : std::uint8_t {
  intervals,  // or none
  ranks,      // of the keys, in mixed order, with the mask of a case without intervals
};

class DeviceKeyChoice {
 public:
  DeviceKeyChoice(const Data& data, KeyChoice choice)
      : choice_(choice), problem_(data.problem), intervals_(data.intervals) {
    if (data.has_intervals()) bound_ = least_bound(data.intervals_view(), data.problem);
    if (choice == KeyChoice::ranks) rank_keys();
  }

  // The case's problem, of this choice.
  const Problem& problem() const { return problem_; }

  Visibility visibility(const Data& data) const {
    Visibility result;
    switch (choice_) {
      case KeyChoice::intervals:
        if (!data.has_intervals()) break;
        result.intervals = data.intervals_view();
        result.intervals.data = intervals_.as<KeyInterval>();
        result.bound = bound_;
        break;
      case KeyChoice::ranks:
        result.ranks = {{ranks_->data(), contiguous_strides(problem_.rank_shape)},
                        {limits_->data(), contiguous_strides(problem_.limit_shape)}};
        break;
    }
    return result;
  }

 private:
  // Limits go from a quarter to half of the keys.
  void rank_keys() {
    const std::int64_t n = problem_.seqlen_k;
    problem_.rank_shape = {1, problem_.heads_kv, 1, n};
    problem_.limit_shape = {1, problem_.heads_kv, problem_.seqlen_q, 1};
    std::vector<std::int32_t> ranks;
    std::vector<std::int32_t> limits;
    for (std::int64_t head = 0; head < problem_.heads_kv; ++head) {
      for (std::int64_t j = 0; j < n; ++j)
        ranks.push_back(static_cast<std::int32_t>((7919 * j + head) % n));
      for (std::int64_t i = 0; i < problem_.seqlen_q; ++i)
        limits.push_back(static_cast<std::int32_t>(n / 4 + 37 * i % (n / 4)));
    }
    ranks_.emplace(ranks);
    limits_.emplace(limits);
  }

  KeyChoice choice_;
  Problem problem_;
  KeyBound bound_;
  DeviceBuffer intervals_;
  std::optional<DeviceBuffer> ranks_;   // of the keys
  std::optional<DeviceBuffer> limits_;  // of the queries
};

}  // namespace flash_dmattn::testing
