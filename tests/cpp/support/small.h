#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flash_dmattn/attention.h"
#include "support/data.h"
#include "support/run.h"

// Problems that are small enough for results computed by hand, on the reference backend.
namespace flash_dmattn::testing {

inline RunOptions reference(int workers = 1) {
  RunOptions options;
  options.backend = "reference";
  options.execution = sequential_execution(workers);
  return options;
}

using Values = std::vector<double>;

// Makes a problem with B = H = 1 whose tensors start as zero.
inline Data small(std::int64_t seqlen_q, std::int64_t seqlen_k, std::int64_t head_dim,
                  DType dtype = DType::f32, BroadcastShape bias_shape = {},
                  BroadcastShape mask_shape = {}, DType bias_dtype = no_dtype) {
  Problem p;
  p.batch = 1;
  p.heads_q = 1;
  p.heads_kv = 1;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.head_dim = head_dim;
  p.dtype = dtype;
  p.scale = 1;
  p.bias_shape = bias_shape;
  p.bias_dtype = bias_dtype != no_dtype ? bias_dtype
                 : dtype == DType::f64  ? DType::f64
                                        : DType::f32;
  p.mask_shape = mask_shape;
  Data data(p);
  for (Tensor* tensor : {&data.q, &data.k, &data.v, &data.bias, &data.dout}) {
    tensor->fill([](const Index&) { return 0.0; });
  }
  data.mask.fill([](const Index&) { return 1.0; });
  return data;
}

inline void set_row(Tensor& tensor, std::int64_t row, const Values& values) {
  for (std::size_t d = 0; d < values.size(); ++d) {
    tensor.set({0, row, 0, static_cast<std::int64_t>(d)}, values[d]);
  }
}

inline Values values_of(const Tensor& tensor) {
  Values values;
  tensor.for_each([&](const Index&, double value) { values.push_back(value); });
  return values;
}

}  // namespace flash_dmattn::testing
