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

}  // namespace flash_dmattn
