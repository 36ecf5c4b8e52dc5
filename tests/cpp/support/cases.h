#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "flash_dmattn/attention.h"
#include "support/tensor.h"

namespace flash_dmattn::testing {

// A row of tests/cases/attention.csv. The comment at the top of that file explains the words. Fills stay
// words here; data.cpp interprets them.
struct Case {
  std::string name;
  Problem problem;  // complete, with the shapes of mask, bias and intervals
  std::string mask_fill;
  std::string bias_fill;
  std::string intervals;  // the kind of intervals; "none"
  std::int64_t window = 0;
  std::string rule;
  std::string inputs;
  Layout layout = Layout::contiguous;
  bool has_dlse = false;
  std::uint64_t seed = 0;
  bool slow = false;
  bool only_on_gpus = false;
};

// True with FLASH_DMATTN_QUICK_TESTS, under sanitizers and emulators. Slow cases are then skipped, and random tests draw
// fewer samples.
bool is_quick_run();

// True in a build with FLASH_DMATTN_SANITIZE.
inline constexpr bool is_sanitized = FLASH_DMATTN_SANITIZED;

// A row as a map from column name to word. Missing columns have the table's defaults, so a test needs to name
// only what is special about its case.
struct CaseWords : std::map<std::string, std::string> {
  using map::map;
  // From "heads_q=4 causal=1", and words that are no literals.
  CaseWords(const char* text, std::initializer_list<value_type> others = {});
};
Case case_from(const CaseWords& words);

// The table in its order. Throws a std::runtime_error that names a malformed line.
const std::vector<Case>& attention_cases();
const Case& attention_case(const std::string& name);

std::ostream& operator<<(std::ostream& stream, const Case& c);

}  // namespace flash_dmattn::testing
