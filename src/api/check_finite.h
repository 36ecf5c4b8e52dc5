#pragma once

#include <string_view>

#include "flash_dmattn/attention.h"
#include "flash_dmattn/kv_cache.h"

// Check mode: FLASH_DMATTN_CHECK_FINITE=1 makes every call name the first non-finite element of its
// inputs, before it computes, and of its outputs, after. On a GPU it waits for the device each time.
namespace flash_dmattn {

// Whether a value of the environment variable switches the check on. Throws InvalidArgument for any other value (such as
// "true"), because its user relies on the check.
bool check_finite_of(std::string_view value);

// The environment is read once, when this is first called.
bool check_finite_enabled();

// Overrides the environment from now on. For tests.
void set_check_finite(bool enabled);

// Each throws NonFiniteError, as "forward input k[0, 12, 3, 7] is nan". A bias of -inf masks, and an
// lse of -inf belongs to a query that sees no key: neither is reported.
void check_inputs_finite(const ForwardArgs& args, const Execution& execution);
void check_outputs_finite(const ForwardArgs& args, const Execution& execution);
void check_inputs_finite(const BackwardArgs& args, const Execution& execution);
void check_outputs_finite(const BackwardArgs& args, const Execution& execution);
// The tokens of the step; the slots hold only what has been checked before.
void check_inputs_finite(const DecodeStepArgs& args, const Execution& execution);
void check_outputs_finite(const DecodeStepArgs& args, const Execution& execution);

}  // namespace flash_dmattn
