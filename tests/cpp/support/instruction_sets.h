#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "cpu/dispatch.h"

namespace flash_dmattn::testing {

// Calls test() on each instruction set that this process may use, and then selects the largest again.
template <class Test>
void on_each_instruction_set(const Test& test) {
  for (const cpu::Candidate& candidate : cpu::allowed()) {
    SCOPED_TRACE(std::string(cpu::name_of(candidate.isa)));
    cpu::choose(candidate);
    test();
  }
}

// The same on one of them, by a number.
template <class Test>
void on_one_instruction_set(std::size_t number, const Test& test) {
  const auto allowed = cpu::allowed();
  const cpu::Candidate& candidate = allowed[number % allowed.size()];
  SCOPED_TRACE(std::string(cpu::name_of(candidate.isa)));
  cpu::choose(candidate);
  test();
  cpu::choose(allowed.back());
}

}  // namespace flash_dmattn::testing
