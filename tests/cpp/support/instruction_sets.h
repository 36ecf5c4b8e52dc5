#pragma once

#include <gtest/gtest.h>

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

}  // namespace flash_dmattn::testing
