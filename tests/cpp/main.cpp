#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "flash_dmattn/attention.h"
#include "support/cases.h"
#include "support/instruction_sets.h"

namespace {

// ctest reports this exit status as "skipped" (SKIP_RETURN_CODE in CMakeLists.txt).
constexpr int exit_skipped = 77;

// The instruction sets in ascending order, as in cmake/InstructionSets.cmake.
constexpr std::array<std::string_view, 5> instruction_sets = {"generic", "avx2", "avx512",
                                                              "avx512_bf16", "amx_bf16"};

// The position of a name in instruction_sets, or its size if the name is unknown.
std::size_t rank(std::string_view name) {
  return static_cast<std::size_t>(
      std::find(instruction_sets.begin(), instruction_sets.end(), name) - instruction_sets.begin());
}

flash_dmattn::BackendInfo find_backend(std::string_view name) {
  for (const auto& backend : flash_dmattn::backends()) {
    if (backend.name == name) return backend;
  }
  return {name, false, "there is no such backend"};
}

// Runs each test on one of the instruction sets of this machine.
class OneSetForEachTest : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& test) override {
    flash_dmattn::testing::choose_by_name(std::string(test.test_suite_name()) + "." + test.name());
  }
};

}  // namespace

// With FLASH_DMATTN_TEST_BACKEND the tests run where that backend is available, and print the reason where it is not.
//
// With FLASH_DMATTN_TEST_ISA the tests run on that instruction set or not at all. They are skipped only if the
// machine or the compiler lacks it; a larger set in use means that the cap does not work. "any" is one set for each test.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const char* wanted = std::getenv("FLASH_DMATTN_TEST_BACKEND")) {
    const flash_dmattn::BackendInfo info = find_backend(wanted);
    if (!info.available) {
      std::printf("SKIPPED %s: %s\n", wanted, info.reason.c_str());
      return exit_skipped;
    }
  }
  const char* wanted = std::getenv("FLASH_DMATTN_TEST_ISA");
  if (wanted != nullptr && std::string_view(wanted) == "any") {
    testing::UnitTest::GetInstance()->listeners().Append(new OneSetForEachTest);
  } else if (wanted != nullptr) {
    // The instruction set of the CPU backend after FLASH_DMATTN_MAX_ISA is applied.
    const std::string used = find_backend("cpu").reason;
    if (rank(used) > rank(wanted)) {
      std::printf("FAILED %s: the library runs on %s instead\n", wanted, used.c_str());
      return 1;
    }
    if (rank(used) < rank(wanted)) {
      std::printf("SKIPPED %s: this processor or compiler goes up to %s\n", wanted, used.c_str());
      return exit_skipped;
    }
  }
  if (flash_dmattn::testing::is_sanitized && flash_dmattn::testing::is_quick_run()) {
    std::puts("NOT COMPARED: results of run_and_compare, in a quick run under sanitizers");
  }
  return RUN_ALL_TESTS();
}
