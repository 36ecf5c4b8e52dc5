#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <string>

#include "cpu/dispatch.h"

namespace flash_dmattn::testing {

// Calls test() on each instruction set that this process may use, and then selects the largest again.
template <class Test>
void on_each_instruction_set(const Test& test) {
  for (const cpu::Candidate& candidate : cpu::allowed_instruction_sets()) {
    SCOPED_TRACE(std::string(cpu::name_of(candidate.isa)));
    cpu::choose_instruction_set(candidate);
    test();
  }
}

// Selects one of them by the name of a test, and prints which: ctest shows it with a failure, also where a sanitizer ends the process.
inline void choose_by_name(const std::string& test) {
  const auto allowed = cpu::allowed_instruction_sets();
  const cpu::Candidate& candidate = allowed[std::hash<std::string>()(test) % allowed.size()];
  cpu::choose_instruction_set(candidate);
  std::fprintf(stderr, "%s on %s\n", test.c_str(),
               std::string(cpu::name_of(candidate.isa)).c_str());
}

}  // namespace flash_dmattn::testing
