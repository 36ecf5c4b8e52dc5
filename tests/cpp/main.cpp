#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "flash_dmattn/attention.h"

namespace {

// ctest reports this exit status as "skipped" (SKIP_RETURN_CODE in CMakeLists.txt).
constexpr int exit_skipped = 77;

// Ascending, as in cmake/InstructionSets.cmake.
constexpr std::array<std::string_view, 5> instruction_sets = {"generic", "avx2", "avx512",
                                                              "avx512_bf16", "amx_bf16"};

// Position in instruction_sets; its size for a name that is not there.
std::size_t rank(std::string_view name) {
  return static_cast<std::size_t>(
      std::find(instruction_sets.begin(), instruction_sets.end(), name) - instruction_sets.begin());
}

// The instruction set of the CPU backend, FLASH_DMATTN_MAX_ISA applied.
std::string instruction_set_in_use() {
  for (const auto& backend : flash_dmattn::backends()) {
    if (backend.name == "cpu") return backend.reason;
  }
  return "no CPU backend";
}

}  // namespace

// With FLASH_DMATTN_TEST_ISA the tests run on that instruction set or not at all. Only a machine or a
// compiler without it is a reason to skip: a larger set in use means that the cap does not work.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const char* wanted = std::getenv("FLASH_DMATTN_TEST_ISA")) {
    const std::string used = instruction_set_in_use();
    if (rank(used) > rank(wanted)) {
      std::printf("FAILED %s: the library runs on %s instead\n", wanted, used.c_str());
      return 1;
    }
    if (rank(used) < rank(wanted)) {
      std::printf("SKIPPED %s: this processor or compiler goes up to %s\n", wanted, used.c_str());
      return exit_skipped;
    }
  }
  return RUN_ALL_TESTS();
}
