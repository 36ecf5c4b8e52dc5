#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support/call.h"

// Every bad argument raises an error that names it, and nothing is written.
namespace flash_dmattn::testing {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

template <class Args>
struct Bad {
  std::string argument;
  std::string message;
  void (*spoil)(Args&);
};

// The values of a new Problem are refused too: with a size of 0, nothing would be computed, or out would be 0; a default
// dtype could read past the end, or read two smaller numbers as one.
const std::vector<Bad<Problem>> bad_problems = {
    {"problem.batch", "got -1, expected a length in [0, 2^31)",
     [](Problem& p) { p.batch = Problem{}.batch; }},
    {"problem.heads_q", "got -1, expected a length in [0, 2^31)",
     [](Problem& p) { p.heads_q = Problem{}.heads_q; }},
    {"problem.heads_kv", "got -1, expected a length in [0, 2^31)",
     [](Problem& p) { p.heads_kv = Problem{}.heads_kv; }},
    {"problem.seqlen_q", "got -1, expected a length in [0, 2^31)",
     [](Problem& p) { p.seqlen_q = Problem{}.seqlen_q; }},
    {"problem.seqlen_q", "got 2147483648, expected a length in [0, 2^31)",
     [](Problem& p) { p.seqlen_q = std::int64_t{1} << 31; }},
    {"problem.seqlen_k", "got -1, expected a length in [0, 2^31)",
     [](Problem& p) { p.seqlen_k = Problem{}.seqlen_k; }},
    {"problem.head_dim", "got -1, expected 1 to 256",
     [](Problem& p) { p.head_dim = Problem{}.head_dim; }},
    {"problem.head_dim", "got 257, expected 1 to 256", [](Problem& p) { p.head_dim = 257; }},
    {"problem.value_dim", "got 9, expected 1 to 8", [](Problem& p) { p.value_dim = 9; }},
    {"problem.value_dim", "got -1, expected 1 to 8", [](Problem& p) { p.value_dim = -1; }},
    {"problem.heads_q", "got 3, expected a multiple of problem.heads_kv = 2",
     [](Problem& p) { p.heads_q = 3; }},
    {"problem.heads_q", "got 4, expected a multiple of problem.heads_kv = 0",
     [](Problem& p) { p.heads_kv = 0; }},
    {"problem",
     "got batch, heads_q, seqlen_q, seqlen_k, head_dim (2000000000, 4, 2000000000, 7, 8), expected "
     "tensors of at most 2^56 elements",
     [](Problem& p) { p.batch = p.seqlen_q = 2000000000; }},
    {"problem.dtype", "got no dtype, expected f32, bf16, f16 or f64",
     [](Problem& p) { p.dtype = Problem{}.dtype; }},
    {"problem.bias_dtype", "got no dtype, expected f32 with problem.dtype f32",
     [](Problem& p) { p.bias_dtype = Problem{}.bias_dtype; }},
    {"problem.device", "got 9, expected cpu or cuda",
     [](Problem& p) { p.device = static_cast<Device>(9); }},
    {"problem.nonfinite", "got 9, expected saturate or propagate",
     [](Problem& p) { p.nonfinite = static_cast<NonFinite>(9); }},
    {"problem.scale", "got -inf, expected a finite f64",
     [](Problem& p) { p.dtype = DType::f64, p.scale = -infinity; }},
    {"problem.scale", "got 1e+39, expected a finite f32", [](Problem& p) { p.scale = 1e39; }},
    {"problem.scale", "got nan, expected a finite f32",
     [](Problem& p) { p.scale = Problem{}.scale; }},
    {"problem.softcap", "got -0.5, expected a finite f32 >= 0 (0 = none)",
     [](Problem& p) { p.softcap = -0.5; }},
    {"problem.softcap", "got 1e+39, expected a finite f32 >= 0 (0 = none)",
     [](Problem& p) { p.softcap = 1e39; }},
    {"problem.softcap", "got nan, expected a finite f32 >= 0 (0 = none)",
     [](Problem& p) { p.softcap = nan; }},
    {"problem.bias_delay", "got -1, expected at least 0", [](Problem& p) { p.bias_delay = -1; }},
    {"problem.bias_delay",
     "got 3, expected 0, or a bias without a query dimension: problem.bias_shape is (1, 1, 5, 7)",
     [](Problem& p) { p.bias_delay = 3, p.bias_shape = {1, 1, 5, 7}; }},
    {"problem.mask_shape",
     "got (2, 3, 1, 7), expected ({2|1}, {4|2|1}, {5|1}, {7|1}), or all zero for none",
     [](Problem& p) { p.mask_shape = {2, 3, 1, 7}; }},
    {"problem.bias_shape",
     "got (2, 2, 1, 5), expected ({2|1}, {4|2|1}, {5|1}, {7|1}), or all zero for none",
     [](Problem& p) { p.bias_shape = {2, 2, 1, 5}; }},
    {"problem.bias_dtype", "got f16, expected bf16 or f32 with problem.dtype bf16",
     [](Problem& p) { p.dtype = DType::bf16, p.bias_dtype = DType::f16; }},
    {"problem.bias_dtype", "got f32, expected f64 with problem.dtype f64",
     [](Problem& p) { p.dtype = DType::f64; }},
    {"problem.intervals_shape", "got (2, 4), expected ({2|1}, {2|1}), or all zero for none",
     [](Problem& p) { p.intervals_shape = {2, 4}; }},
};

TEST(InvalidArguments, BadProblemThrows) {
  for (const auto& [argument, message, spoil] : bad_problems) {
    SCOPED_TRACE(argument + ": " + message);
    Call call;
    spoil(call.forward_args.problem);
    spoil(call.backward_args.problem);
    expect_invalid([&] { supports(call.forward_args.problem); }, argument, message);
    expect_invalid([&] { call.run_forward(); }, argument, message);
    expect_invalid([&] { call.run_backward(); }, argument, message);
    call.expect_nothing_written();
  }
}

// Forward and backward check their inputs with one function.
const std::vector<Bad<ForwardArgs>> bad_forward = {
    {"q", "got null data, expected data of shape (2, 5, 4, 8)",
     [](ForwardArgs& args) { args.in.q.data = nullptr; }},
    {"k", "got strides (112, 16, 8, 2), expected a last dimension that is contiguous (stride 1)",
     [](ForwardArgs& args) { args.in.k.stride[3] = 2; }},
    {"v",
     "got strides (9223372036854775807, 16, 8, 1) for shape (2, 7, 2, 8), expected a span of at "
     "most "
     "2^56 elements",
     [](ForwardArgs& args) { args.in.v.stride[0] = std::numeric_limits<std::int64_t>::max(); }},
    {"q",
     "got strides (160, -9223372036854775808, 8, 1) for shape (2, 5, 4, 8), expected a span of at "
     "most "
     "2^56 elements",
     [](ForwardArgs& args) { args.in.q.stride[1] = std::numeric_limits<std::int64_t>::min(); }},
    {"mask", "got strides (7, 0, 0, 0), expected a last dimension that is contiguous (stride 1)",
     [](ForwardArgs& args) { args.in.mask.stride[3] = 0; }},
    {"mask", "got data, expected null data while problem.mask_shape is all zero",
     [](ForwardArgs& args) { args.problem.mask_shape = {}; }},
    {"bias", "got null data, expected data of shape (2, 2, 1, 7)",
     [](ForwardArgs& args) { args.in.bias = {}; }},
    {"visibility.intervals", "got null data, expected data of shape (2, 1, 1, 7)",
     [](ForwardArgs& args) { args.in.visibility.intervals = {}; }},
    {"visibility.intervals",
     "got data, expected null data while problem.intervals_shape is all zero",
     [](ForwardArgs& args) { args.problem.intervals_shape = {}; }},
    {"out",
     "got strides (160, 32, 0, 1) for shape (2, 5, 4, 8), expected an output whose elements do not "
     "overlap",
     [](ForwardArgs& args) { args.out.stride[2] = 0; }},
    {"lse", "got null data, expected data of shape (2, 4, 5)",
     [](ForwardArgs& args) { args.lse = nullptr; }},
    {"lse", "got f64, expected f32 with problem.dtype f32",
     [](ForwardArgs& args) { args.lse = static_cast<double*>(args.out.data); }},
};

const std::vector<Bad<BackwardArgs>> bad_backward = {
    {"q", "got null data, expected data of shape (2, 5, 4, 8)",
     [](BackwardArgs& args) { args.in.q.data = nullptr; }},
    {"out", "got null data, expected data of shape (2, 5, 4, 8)",
     [](BackwardArgs& args) { args.out.data = nullptr; }},
    {"lse", "got null data, expected data of shape (2, 4, 5)",
     [](BackwardArgs& args) { args.lse = nullptr; }},
    {"lse_low", "got f64, expected f32 with problem.dtype f32",
     [](BackwardArgs& args) { args.lse_low = static_cast<const double*>(args.out.data); }},
    {"dout", "got null data, expected data of shape (2, 5, 4, 8)",
     [](BackwardArgs& args) { args.dout.data = nullptr; }},
    {"dq", "got strides (160, 32, 8, 4), expected a last dimension that is contiguous (stride 1)",
     [](BackwardArgs& args) { args.dq.stride[3] = 4; }},
    {"dk",
     "got strides (0, 16, 8, 1) for shape (2, 7, 2, 8), expected an output whose elements do not "
     "overlap",
     [](BackwardArgs& args) { args.dk.stride[0] = 0; }},
    {"dv", "got strides (112, 16, 8, 0), expected a last dimension that is contiguous (stride 1)",
     [](BackwardArgs& args) { args.dv.stride[3] = 0; }},
    {"dbias",
     "got strides (14, 0, 0, 1) for shape (2, 2, 1, 7), expected an output whose elements do not "
     "overlap",
     [](BackwardArgs& args) { args.dbias.stride[1] = 0; }},
    {"dbias", "got data, expected null data while problem.bias_shape is all zero",
     [](BackwardArgs& args) { args.problem.bias_shape = {}, args.in.bias = {}; }},
};

TEST(InvalidArguments, BadTensorThrows) {
  for (const auto& [argument, message, spoil] : bad_forward) {
    SCOPED_TRACE(argument + ": " + message);
    Call call;
    spoil(call.forward_args);
    expect_invalid([&] { call.run_forward(); }, argument, message);
    call.expect_nothing_written();
  }
  for (const auto& [argument, message, spoil] : bad_backward) {
    SCOPED_TRACE("backward " + argument + ": " + message);
    Call call;
    spoil(call.backward_args);
    expect_invalid([&] { call.run_backward(); }, argument, message);
    call.expect_nothing_written();
  }
}

TEST(InvalidArguments, BadExecutionThrows) {
  Call call("reference");
  const std::size_t needed =
      ForwardCall(call.forward_args, call.execution, "reference").workspace_size();
  ASSERT_GT(needed, 0u);

  call.execution.workspace_bytes = needed - 1;
  expect_invalid(
      [&] { call.run_forward(); }, "execution.workspace_bytes",
      "got " + std::to_string(needed - 1) + ", expected at least " + std::to_string(needed));
  call.execution.workspace_bytes = needed;
  call.execution.workspace = nullptr;
  expect_invalid([&] { call.run_forward(); }, "execution.workspace",
                 "got null, expected a pointer");
  call.execution.workspace = call.workspace.data() + 8;
  expect_invalid([&] { call.run_forward(); }, "execution.workspace",
                 "got an address 8 bytes off alignment, expected an address aligned to 64 bytes");
  call.execution.workers = 0;
  expect_invalid([&] { call.run_forward(); }, "execution.workers", "got 0, expected at least 1");
  expect_invalid([&] { call.run_backward(); }, "execution.workers", "got 0, expected at least 1");
  call.expect_nothing_written();
}

}  // namespace
}  // namespace flash_dmattn::testing
