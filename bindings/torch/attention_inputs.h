#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "arguments.h"
#include "device.h"

// The tensors of an attention operator as the structs of the C++ API.
namespace flash_dmattn::binding {

// The inputs that forward and backward share.
struct Attention {
  CallDevice device;
  Problem problem;
  Inputs in;
  Execution execution;
  std::vector<Tensor> owned;  // memory that `in` points to

  explicit Attention(const Tensor& q) : device(q) { owned.reserve(8); }

  const void* own(const Tensor& tensor) {
    owned.push_back(tensor);
    return tensor.const_data_ptr();
  }
};

// The arguments of an operator that say which keys each query sees. Operators initialise both structs by position, so
// the members are in the order of the schemas in ops.cpp.
struct VisibleKeys {
  const OptionalTensor& intervals;
  const std::vector<std::int64_t>& bound;  // the members of a KeyBound, or nothing
};

struct Options {
  bool causal;
  std::int64_t bias_delay;
  double scale;
  double softcap;
  bool saturate;
  bool deterministic;
};

// Takes `tensor` into the call and returns its view.
ConstTensor4 take_rows(Attention& call, const Tensor& tensor);

// q, k, v, mask and bias.
Attention take_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                      const OptionalTensor& bias, const Options& options, bool bias_needs_gradient);

// q, k, v, mask, bias and what is visible.
Attention prepare(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                  const OptionalTensor& bias, const VisibleKeys& keys, const Options& options,
                  bool bias_needs_gradient);

}  // namespace flash_dmattn::binding
