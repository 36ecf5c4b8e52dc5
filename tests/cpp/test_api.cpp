#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support/call.h"
#include "support/compare.h"

// Behaviour that all backends share: the backend table, and calls with unusual but legal arguments.
namespace flash_dmattn::testing {
namespace {

// ---- Backends ------------------------------------------------------------------------------------

TEST(Backends, ListIsInOrderOfPreference) {
  const std::vector<BackendInfo> infos = backends();
  ASSERT_EQ(infos.size(), 3u);
  EXPECT_EQ(infos[0].name, "cuda");  // available where there is a GPU and the build has its kernels
  EXPECT_EQ(infos[1].name, "cpu");
  EXPECT_EQ(infos[2].name, "reference");
  for (const BackendInfo& info : infos) EXPECT_FALSE(info.reason.empty());
  EXPECT_TRUE(infos[1].available);
  EXPECT_TRUE(infos[2].available);
}

TEST(Backends, MemoryOfAnotherDeviceIsDeclined) {
  Problem p = Call().data.problem;
  EXPECT_NE(supports(p, "cuda"), "");
  p.device = Device::cuda;
  EXPECT_NE(supports(p, "cpu").find("cpu computes in cpu memory, and the problem's is cuda"),
            std::string::npos);
  EXPECT_NE(supports(p, "reference").find("reference computes in cpu memory"), std::string::npos);
}

TEST(Backends, UnsupportedProblemGivesReason) {
  Problem p = Call().data.problem;
  EXPECT_EQ(supports(p), "");
  EXPECT_EQ(supports(p, "cpu"), "");
  EXPECT_EQ(supports(p, "reference"), "");
  p.dtype = DType::f64;
  p.bias_dtype = DType::f64;
  EXPECT_EQ(supports(p), "");
  EXPECT_EQ(supports(p, "reference"), "");
  const std::string reason = supports(p, "cpu");
  EXPECT_NE(reason.find("f64"), std::string::npos) << reason;
  Call call;
  call.forward_args.problem = p;
  expect_invalid([&] { ForwardCall(call.forward_args, call.execution, "cpu"); }, "backend",
                 "got \"cpu\", expected one that supports the problem (" + reason + ")");
}

TEST(Backends, TooManyHeadsPerGroupUseTheReference) {
  Problem p = Call().data.problem;
  p.mask_shape = p.bias_shape = {};
  p.heads_kv = 1;
  p.heads_q = 1 << 16;
  EXPECT_EQ(supports(p, "cpu"), "");
  p.heads_q = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(supports(p, "cpu"), "cpu: more than 65536 query heads share a kv head");
  EXPECT_EQ(supports(p), "");
  // In fp32, 2^31 rows of a tile need more bytes than an int can count.
  ForwardArgs args;
  args.problem = p;
  args.problem.intervals_shape = {};
  float one = 0;
  args.in.q = args.in.k = args.in.v = {&one, {0, 0, 0, 1}};
  args.out = {&one, contiguous_strides({p.batch, p.seqlen_q, p.heads_q, p.head_dim})};
  args.lse = &one;
  EXPECT_LT(ForwardCall(args, in_turn(1)).workspace_size(), std::size_t{1} << 20);
}

// The bytes that the gradient of a bias that all heads share adds: sums of dk and dv for each further segment, and of
// dbias for each part. The pointers are only compared with null.
TEST(Backends, SharedBiasGradientTakesTheLeastMemoryOfSixteenItems) {
  struct Shape {
    std::int64_t batch, seqlen, segments, parts;
  };
  for (const Shape& shape : {Shape{64, 2048, 1, 16}, Shape{64, 8192, 2, 8}, Shape{2, 1024, 4, 4}}) {
    SCOPED_TRACE(std::to_string(shape.batch) + " x 8 heads, seqlen " +
                 std::to_string(shape.seqlen));
    BackwardArgs args;
    Problem& p = args.problem = Call().data.problem;
    p.batch = shape.batch;
    p.heads_q = p.heads_kv = 8;
    p.seqlen_q = p.seqlen_k = shape.seqlen;
    p.head_dim = 64;
    p.causal = false;
    p.mask_shape = {};
    p.intervals_shape = {};
    p.bias_shape = {1, 1, shape.seqlen, shape.seqlen};
    float one = 0;
    args.in.q = args.in.k = args.in.v = args.out = args.dout = {&one, {0, 0, 0, 1}};
    args.in.bias = {&one, {0, 0, 0, 1}};
    args.lse = {&one};
    const auto size = [&](void* dbias) {
      args.dbias = {dbias, {0, 0, shape.seqlen, 1}};
      return static_cast<double>(BackwardCall(args, in_turn(16), "cpu").workspace_size());
    };
    const std::int64_t segment = shape.batch * 8 * shape.seqlen * 64 * 2 * sizeof(float);
    const std::int64_t part = shape.seqlen * shape.seqlen * sizeof(double);
    const auto expected = static_cast<double>((shape.segments - 1) * segment + shape.parts * part);
    const double added = size(&one) - size(nullptr);  // with some scratch
    EXPECT_GE(added, expected);
    EXPECT_LT(added, 1.2 * expected);
  }
}

TEST(Backends, UnknownNameThrows) {
  Call call;
  call.backend = "gpu";
  const std::string message =
      "got \"gpu\", expected \"cuda\", \"cpu\", \"reference\", or \"\" for the first that supports "
      "the problem";
  expect_invalid([&] { supports(call.data.problem, "gpu"); }, "backend", message);
  expect_invalid([&] { call.run_forward(); }, "backend", message);
  expect_invalid([&] { call.run_backward(); }, "backend", message);
  call.expect_nothing_written();
}

// ---- Legal calls ---------------------------------------------------------------------------------

TEST(LegalArguments, StridesOfSizeOneAreIgnored) {
  for (const char* backend : {"cpu", "reference"}) {
    Call expected(backend, "bias=1v1k mask=11q1 intervals_shape=11");
    expected.run_forward();
    expected.run_backward();
    Call call(backend, "bias=1v1k mask=11q1 intervals_shape=11");
    for (Inputs* in : {&call.forward_args.in, &call.backward_args.in}) {
      in->bias.stride[0] = in->bias.stride[2] = 1 << 20;
      in->mask.stride[0] = in->mask.stride[1] = in->mask.stride[3] = 1 << 20;
      in->visibility.intervals.stride_batch = in->visibility.intervals.stride_head = 1 << 20;
    }
    call.backward_args.dbias.stride[0] = call.backward_args.dbias.stride[2] = 1 << 20;
    call.run_forward();
    call.run_backward();
    expect_same_bits(call.results, expected.results);
  }
}

// All outputs that have elements become zero (lse: -inf).
TEST(LegalArguments, EmptyDimensionsGiveZeros) {
  const std::vector<CaseWords> empties = {"batch=0",
                                          "batch=0 bias=1v1k",
                                          "heads_q=0",
                                          "heads_q=0 heads_kv=0 bias=b11k",
                                          "seqlen_q=0 bias=b11k",
                                          "seqlen_k=0 bias=bvq1",
                                          "seqlen_q=0 seqlen_k=0 bias=1111"};
  for (const char* backend : {"cpu", "reference"}) {
    for (CaseWords words : empties) {
      words.merge(CaseWords("intervals=none mask=none"));
      std::string trace = backend;
      for (const auto& [column, word] : words) trace += " " + column + "=" + word;
      SCOPED_TRACE(trace);
      const Data data(case_from(Call::with_defaults(words)));
      RunOptions options;
      options.backend = backend;
      const Results results = run(data, options);
      expect_all(results.out, 0);
      expect_all(results.lse, -std::numeric_limits<double>::infinity());
      for (const Tensor* tensor : {&results.dq, &results.dk, &results.dv, &results.dbias}) {
        expect_all(*tensor, 0);
      }
    }
  }
}

TEST(LegalArguments, DefaultScaleIsInverseRootOfHeadDim) {
  EXPECT_EQ(default_scale(64), 0.125f);
  EXPECT_DOUBLE_EQ(default_scale(80), 1 / std::sqrt(80.0));
}

}  // namespace
}  // namespace flash_dmattn::testing
