#pragma once

#include <gtest/gtest.h>

#include <string>

#include "flash_dmattn/error.h"

namespace flash_dmattn::testing {

// Expects `action` to throw InvalidArgument for `argument`, with exactly this text after it unless none is given.
template <class Action>
void expect_invalid(const Action& action, const std::string& argument,
                    const std::string& message = {}) {
  try {
    action();
    ADD_FAILURE() << "nothing thrown for " << argument;
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), argument) << error.what();
    if (!message.empty()) {
      EXPECT_EQ(error.what(), argument + ": " + message);
    }
  }
}

}  // namespace flash_dmattn::testing
