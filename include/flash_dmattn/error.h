#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace flash_dmattn {

// The one exception for bad arguments. It is thrown before any output is written.
class InvalidArgument : public std::invalid_argument {
 public:
  // what() reads "<argument>: got <value>, expected <expected>".
  InvalidArgument(std::string_view argument, std::string_view value, std::string_view expected)
      : std::invalid_argument(std::string(argument) + ": got " + std::string(value) +
                              ", expected " + std::string(expected)),
        argument_(argument) {}

  const std::string& argument() const noexcept { return argument_; }

 private:
  std::string argument_;
};

// Thrown in check mode (FLASH_DMATTN_CHECK_FINITE=1) for the first non-finite value found; what()
// names the stage, the tensor, the index and the value.
class NonFiniteError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace flash_dmattn
