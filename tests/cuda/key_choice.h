#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "device.h"
#include "least_bound.h"

// A choice of keys on the device: the intervals of a case, or one of the forms that tests/cases has no words for.
namespace flash_dmattn::testing {

enum class KeyChoice : std::uint8_t {
  intervals,  // or none
  key_list,   // of the keys whose interval is not empty: those of a global selection
  ranks,      // of the keys, in mixed order, with the mask of a case without intervals
};

class DeviceKeyChoice {
 public:
  DeviceKeyChoice(const Data& data, KeyChoice choice)
      : choice_(choice), problem_(data.problem), intervals_(data.intervals) {
    if (data.has_intervals()) bound_ = least_bound(data.intervals_view(), data.problem);
    if (choice == KeyChoice::key_list) list_keys(data);
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
      case KeyChoice::key_list:
        result.key_list = {keys_->as<std::int32_t>(), counts_->as<std::int32_t>(), list_stride()};
        break;
      case KeyChoice::ranks:
        result.ranks = {{keys_->data(), contiguous_strides(problem_.rank_shape)},
                        {counts_->data(), contiguous_strides(problem_.limit_shape)}};
        break;
    }
    return result;
  }

 private:
  std::int64_t list_stride() const { return (problem_.seqlen_k + 3) / 4 * 4; }

  void list_keys(const Data& data) {
    problem_.key_list_shape = problem_.intervals_shape;
    problem_.intervals_shape = {};
    std::vector<std::int32_t> keys;
    std::vector<std::int32_t> counts;
    const std::int64_t rows = problem_.key_list_shape[0] * problem_.key_list_shape[1];
    for (std::int64_t row = 0; row < rows; ++row) {
      keys.resize(static_cast<std::size_t>(row * list_stride()));
      for (std::int64_t j = 0; j < problem_.seqlen_k; ++j) {
        const auto& [first, last] =
            data.intervals[static_cast<std::size_t>(row * problem_.seqlen_k + j)];
        if (first < last) keys.push_back(static_cast<std::int32_t>(j));
      }
      counts.push_back(
          static_cast<std::int32_t>(static_cast<std::int64_t>(keys.size()) - row * list_stride()));
    }
    keys.resize(static_cast<std::size_t>(rows * list_stride()));
    keys_.emplace(keys);
    counts_.emplace(counts);
  }

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
    keys_.emplace(ranks);
    counts_.emplace(limits);
  }

  KeyChoice choice_;
  Problem problem_;
  KeyBound bound_;
  DeviceBuffer intervals_;
  std::optional<DeviceBuffer> keys_;    // of a list, or their ranks
  std::optional<DeviceBuffer> counts_;  // of a list's rows, or the limit of each query
};

}  // namespace flash_dmattn::testing
