#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "flash_dmattn/flash_dmattn.h"
#include "selection/schedule_contents.h"
#include "support/cases.h"
#include "support/data.h"
#include "support/run.h"

// The common part of every backend's calls: the backend table, the argument checks, check mode.
namespace flash_dmattn::testing {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

// A correct call of forward and of backward, to be spoiled.
struct Call {
  Data data;
  Results results;
  OwnedSchedule forward_schedule, backward_schedule;
  ForwardArgs forward_args;
  BackwardArgs backward_args;
  Execution execution;
  GuardedBuffer workspace;
  std::string_view backend;

  explicit Call(std::string_view name = "cpu", const CaseWords& words = {})
      : data(case_from(with_defaults(words))), results(data), backend(name) {
    const Problem& p = data.problem;
    forward_schedule = make_schedule(data, Direction::forward, backend);
    backward_schedule = make_schedule(data, Direction::backward, backend);

    forward_args.problem = p;
    forward_args.in = data.inputs();
    forward_args.schedule = forward_schedule.schedule;
    forward_args.out = results.out.view();
    forward_args.lse = row_values(results.lse);
    backward_args.problem = p;
    backward_args.in = forward_args.in;
    backward_args.schedule = backward_schedule.schedule;
    backward_args.out = results.out.const_view();
    backward_args.lse = row_values(results.lse);
    backward_args.dout = data.dout.const_view();
    backward_args.dq = results.dq.view();
    backward_args.dk = results.dk.view();
    backward_args.dv = results.dv.view();
    backward_args.dbias = results.dbias.view();

    execution = in_turn(2);
    workspace = GuardedBuffer(
        std::max({forward_workspace_size(forward_args, execution, backend),
                  backward_workspace_size(backward_args, execution, backend), workspace_alignment}),
        "workspace");
    execution.workspace = workspace.data();
    execution.workspace_bytes = workspace.size();
  }

  static CaseWords with_defaults(CaseWords words) {
    words.merge(CaseWords{{"batch", "2"},
                          {"heads_q", "4"},
                          {"heads_kv", "2"},
                          {"seqlen_q", "5"},
                          {"seqlen_k", "7"},
                          {"head_dim", "8"},
                          {"mask", "b11k"},
                          {"mask_fill", "random"},
                          {"bias", "bv1k"},
                          {"bias_fill", "normal"},
                          {"intervals", "sliding"},
                          {"intervals_shape", "b1"},
                          {"window", "3"},
                          {"causal", "1"}});
    return words;
  }

  void run_forward() { forward(forward_args, execution, backend); }
  void run_backward() { backward(backward_args, execution, backend); }

  void expect_nothing_written(bool backward_only = false) {
    const Results poisoned(data);
    if (!backward_only) {
      EXPECT_TRUE(results.out.same_bits(poisoned.out));
      EXPECT_TRUE(results.lse.same_bits(poisoned.lse));
    }
    EXPECT_TRUE(results.dq.same_bits(poisoned.dq));
    EXPECT_TRUE(results.dk.same_bits(poisoned.dk));
    EXPECT_TRUE(results.dv.same_bits(poisoned.dv));
    EXPECT_TRUE(results.dbias.same_bits(poisoned.dbias));
  }
};

// Calls `action`, which has to throw InvalidArgument for `argument` with exactly this text after it.
void expect_invalid(const std::function<void()>& action, const std::string& argument,
                    const std::string& message) {
  try {
    action();
    ADD_FAILURE() << "nothing thrown for " << argument;
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), argument);
    EXPECT_EQ(error.what(), argument + ": " + message);
  }
}

// ---- Backends ------------------------------------------------------------------------------------

TEST(Backends, AreListedInOrderOfPreference) {
  const std::vector<BackendInfo> infos = backends();
  ASSERT_EQ(infos.size(), 3u);
  EXPECT_EQ(infos[0].name, "cuda");  // available where there is a GPU and the build has its kernels
  EXPECT_EQ(infos[1].name, "cpu");
  EXPECT_EQ(infos[2].name, "reference");
  for (const BackendInfo& info : infos) EXPECT_FALSE(info.reason.empty());
  EXPECT_TRUE(infos[1].available);
  EXPECT_TRUE(infos[2].available);
}

TEST(Backends, DeclineMemoryOfAnotherDevice) {
  Problem p = Call().data.problem;
  EXPECT_NE(supports(p, "cuda"), "");
  p.device = Device::cuda;
  EXPECT_NE(supports(p, "cpu").find("cpu computes in cpu memory, and the problem's is cuda"),
            std::string::npos);
  EXPECT_NE(supports(p, "reference").find("reference computes in cpu memory"), std::string::npos);
}

TEST(Backends, SayWhetherTheySupportAProblem) {
  Problem p = Call().data.problem;
  EXPECT_EQ(supports(p), "");
  EXPECT_EQ(supports(p, "cpu"), "");
  EXPECT_EQ(supports(p, "reference"), "");
  const KeyInterval everything[2 * 7] = {};
  const Visibility visibility{.intervals = {.data = everything}};
  const auto size = [&](std::string_view backend) {
    return schedule_size(p, visibility, Direction::forward, in_turn(1), backend);
  };
  EXPECT_GT(size("cpu"), 0u);
  EXPECT_EQ(size("reference"), 0u);
  p.dtype = DType::f64;
  p.bias_dtype = DType::f64;
  EXPECT_EQ(supports(p), "");
  EXPECT_EQ(supports(p, "reference"), "");
  const std::string reason = supports(p, "cpu");
  EXPECT_NE(reason.find("f64"), std::string::npos) << reason;
  expect_invalid([&] { size("cpu"); }, "backend",
                 "got \"cpu\", expected one that supports the problem (" + reason + ")");
  EXPECT_EQ(size(""), 0u);
}

TEST(Backends, HeadsThatATileCannotCountGoToTheReference) {
  Problem p = Call().data.problem;
  p.mask_shape = p.bias_shape = {};
  p.heads_kv = 1;
  p.heads_q = 1 << 16;
  EXPECT_EQ(supports(p, "cpu"), "");
  p.heads_q = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(supports(p, "cpu"), "cpu: more than 65536 query heads share a kv head");
  EXPECT_EQ(supports(p), "");
  // In fp32 2^31 rows of a tile need more bytes than an int counts.
  ForwardArgs args;
  args.problem = p;
  args.problem.intervals_shape = {};
  float one = 0;
  args.in.q = args.in.k = args.in.v = {&one, {0, 0, 0, 1}};
  EXPECT_LT(forward_workspace_size(args, in_turn(1)), std::size_t{1} << 20);
}

TEST(Backends, UnknownNamesAreErrors) {
  Call call;
  call.backend = "gpu";
  const std::string message =
      "got \"gpu\", expected \"cuda\", \"cpu\", \"reference\", or \"\" for the first that can";
  expect_invalid([&] { supports(call.data.problem, "gpu"); }, "backend", message);
  expect_invalid([&] { call.run_forward(); }, "backend", message);
  expect_invalid([&] { call.run_backward(); }, "backend", message);
  call.expect_nothing_written();
}

// ---- Bad arguments -------------------------------------------------------------------------------

struct BadProblem {
  std::string argument;
  std::string message;
  void (*spoil)(Problem&);
};

const std::vector<BadProblem> bad_problems = {
    {"problem.batch", "got -1, expected a length in [0, 2^31)", [](Problem& p) { p.batch = -1; }},
    {"problem.heads_q", "got -4, expected a length in [0, 2^31)",
     [](Problem& p) { p.heads_q = -4; }},
    {"problem.heads_kv", "got -2, expected a length in [0, 2^31)",
     [](Problem& p) { p.heads_kv = -2; }},
    {"problem.seqlen_q", "got 2147483648, expected a length in [0, 2^31)",
     [](Problem& p) { p.seqlen_q = std::int64_t{1} << 31; }},
    {"problem.seqlen_k", "got -7, expected a length in [0, 2^31)",
     [](Problem& p) { p.seqlen_k = -7; }},
    {"problem.head_dim", "got 0, expected 1 to 256", [](Problem& p) { p.head_dim = 0; }},
    {"problem.head_dim", "got 257, expected 1 to 256", [](Problem& p) { p.head_dim = 257; }},
    {"problem.heads_q", "got 3, expected a multiple of problem.heads_kv = 2",
     [](Problem& p) { p.heads_q = 3; }},
    {"problem.heads_q", "got 4, expected a multiple of problem.heads_kv = 0",
     [](Problem& p) { p.heads_kv = 0; }},
    {"problem",
     "got batch, heads_q, seqlen_q, seqlen_k, head_dim (2000000000, 4, 2000000000, 7, 8), expected "
     "tensors of at most 2^56 elements",
     [](Problem& p) { p.batch = p.seqlen_q = 2000000000; }},
    {"problem.dtype", "got 9, expected f32, bf16, f16 or f64",
     [](Problem& p) { p.dtype = p.bias_dtype = static_cast<DType>(9); }},
    {"problem.nonfinite", "got 9, expected saturate or propagate",
     [](Problem& p) { p.nonfinite = static_cast<NonFinite>(9); }},
    {"problem.scale", "got inf, expected a finite number", [](Problem& p) { p.scale = infinity; }},
    {"problem.scale", "got nan, expected a finite number", [](Problem& p) { p.scale = nan; }},
    {"problem.softcap", "got -0.5, expected a finite number >= 0 (0 = none)",
     [](Problem& p) { p.softcap = -0.5f; }},
    {"problem.softcap", "got nan, expected a finite number >= 0 (0 = none)",
     [](Problem& p) { p.softcap = nan; }},
    {"problem.mask_shape",
     "got (2, 3, 1, 7), expected ({2|1}, {4|2|1}, {5|1}, {7|1}), or all zero for none",
     [](Problem& p) { p.mask_shape = {2, 3, 1, 7}; }},
    {"problem.bias_shape",
     "got (2, 2, 1, 5), expected ({2|1}, {4|2|1}, {5|1}, {7|1}), or all zero for none",
     [](Problem& p) { p.bias_shape = {2, 2, 1, 5}; }},
    {"problem.bias_dtype", "got f16, expected f32 with problem.dtype f32",
     [](Problem& p) { p.bias_dtype = DType::f16; }},
    {"problem.bias_dtype", "got f16, expected bf16 or f32 with problem.dtype bf16",
     [](Problem& p) { p.dtype = DType::bf16, p.bias_dtype = DType::f16; }},
    {"problem.bias_dtype", "got f32, expected f64 with problem.dtype f64",
     [](Problem& p) { p.dtype = DType::f64; }},
    {"problem.rank_shape",
     "got (2, 2, 5, 7), expected one rank for each of 7 keys, and problem.limit_shape with it",
     [](Problem& p) { p.rank_shape = {2, 2, 5, 7}; }},
    {"problem.limit_shape",
     "got (0, 0, 0, 0), expected one limit for each of 5 queries, and problem.rank_shape with it",
     [](Problem& p) { p.rank_shape = {2, 2, 1, 7}; }},
    {"problem.limit_shape",
     "got (2, 3, 5, 1), expected ({2|1}, {4|2|1}, {5|1}, {7|1}), or all zero for none",
     [](Problem& p) { p.rank_shape = {2, 2, 1, 7}, p.limit_shape = {2, 3, 5, 1}; }},
    {"problem.rank_shape",
     "got (1, 1, 1, 7), expected ranks only with a mask and without intervals",
     [](Problem& p) { p.rank_shape = {1, 1, 1, 7}, p.limit_shape = {1, 1, 5, 1}; }},
    {"problem.intervals_shape", "got (2, 4), expected ({2|1}, {2|1}), or all zero for none",
     [](Problem& p) { p.intervals_shape = {2, 4}; }},
    {"problem.key_list_shape", "got (1, 1), expected all zero with problem.intervals_shape",
     [](Problem& p) { p.key_list_shape = {1, 1}; }},
    {"problem.key_list_shape", "got (3, 1), expected ({2|1}, {2|1}), or all zero for none",
     [](Problem& p) { p.key_list_shape = {3, 1}; }},
};

TEST(InvalidArguments, OfTheProblem) {
  for (const auto& [argument, message, spoil] : bad_problems) {
    SCOPED_TRACE(argument + ": " + message);
    Call call;
    spoil(call.forward_args.problem);
    spoil(call.backward_args.problem);
    const Execution& execution = call.execution;
    expect_invalid([&] { supports(call.forward_args.problem); }, argument, message);
    const auto& [problem, in] = std::tie(call.forward_args.problem, call.forward_args.in);
    expect_invalid([&] { schedule_size(problem, in.visibility, Direction::forward, execution); },
                   argument, message);
    expect_invalid([&] { forward_workspace_size(call.forward_args, execution); }, argument,
                   message);
    expect_invalid([&] { backward_workspace_size(call.backward_args, execution); }, argument,
                   message);
    expect_invalid([&] { call.run_forward(); }, argument, message);
    expect_invalid([&] { call.run_backward(); }, argument, message);
    call.expect_nothing_written();
  }
}

struct BadInput {
  std::string argument;
  std::string message;
  void (*spoil)(Problem&, Inputs&);
};

// Against backend "cpu", which needs a schedule.
const std::vector<BadInput> bad_inputs = {
    {"q", "got null data, expected data of shape (2, 5, 4, 8)",
     [](Problem&, Inputs& in) { in.q.data = nullptr; }},
    {"k", "got strides (112, 16, 8, 2), expected a last dimension that is contiguous (stride 1)",
     [](Problem&, Inputs& in) { in.k.stride[3] = 2; }},
    {"v",
     "got strides (9223372036854775807, 16, 8, 1) for shape (2, 7, 2, 8), expected a span of at "
     "most "
     "2^56 elements",
     [](Problem&, Inputs& in) { in.v.stride[0] = std::numeric_limits<std::int64_t>::max(); }},
    {"q",
     "got strides (160, -9223372036854775808, 8, 1) for shape (2, 5, 4, 8), expected a span of at "
     "most "
     "2^56 elements",
     [](Problem&, Inputs& in) { in.q.stride[1] = std::numeric_limits<std::int64_t>::min(); }},
    {"mask", "got null data, expected data of shape (2, 1, 1, 7)",
     [](Problem&, Inputs& in) { in.mask.data = nullptr; }},
    {"mask", "got strides (7, 0, 0, 0), expected a last dimension that is contiguous (stride 1)",
     [](Problem&, Inputs& in) { in.mask.stride[3] = 0; }},
    {"mask", "got data, expected null data while problem.mask_shape is all zero",
     [](Problem& p, Inputs&) { p.mask_shape = {}; }},
    {"bias", "got null data, expected data of shape (2, 2, 1, 7)",
     [](Problem&, Inputs& in) { in.bias = {}; }},
    {"visibility.intervals", "got null data, expected data of shape (2, 1, 1, 7)",
     [](Problem&, Inputs& in) { in.visibility.intervals = {}; }},
    {"visibility.intervals",
     "got data, expected null data while problem.intervals_shape is all zero",
     [](Problem& p, Inputs&) { p.intervals_shape = {}; }},
    {"schedule", "got a schedule, expected none without intervals or a key list",
     [](Problem& p, Inputs& in) { p.intervals_shape = {}, in.visibility.intervals = {}; }},
    {"visibility.key_list", "got data, expected null data while problem.key_list_shape is all zero",
     [](Problem&, Inputs& in) {
       static constexpr std::int32_t key = 0;
       in.visibility.key_list.keys = &key;
     }},
};

TEST(InvalidArguments, OfTheInputs) {
  for (const auto& [argument, message, spoil] : bad_inputs) {
    SCOPED_TRACE(argument + ": " + message);
    Call call("cpu");
    spoil(call.forward_args.problem, call.forward_args.in);
    spoil(call.backward_args.problem, call.backward_args.in);
    const Execution& execution = call.execution;
    expect_invalid([&] { forward_workspace_size(call.forward_args, execution, "cpu"); }, argument,
                   message);
    expect_invalid([&] { backward_workspace_size(call.backward_args, execution, "cpu"); }, argument,
                   message);
    expect_invalid([&] { call.run_forward(); }, argument, message);
    expect_invalid([&] { call.run_backward(); }, argument, message);
    call.expect_nothing_written();
  }
}

// A schedule built for something else, and what is expected instead.
struct BadSchedule {
  std::string field;
  std::string got, expected;
  void (*spoil)(Problem&);
};

TEST(InvalidArguments, OfAScheduleForAnotherProblem) {
  const std::vector<BadSchedule> cases = {
      {"problem.causal", "0", "1", [](Problem& p) { p.causal = false; }},
      {"problem.seqlen_q", "4", "5", [](Problem& p) { p.seqlen_q = 4; }},
      {"problem.seqlen_k", "6", "7",
       [](Problem& p) { p.seqlen_k = 6, p.mask_shape = p.bias_shape = {}; }},
      {"problem.heads_q", "2", "4", [](Problem& p) { p.heads_q = 2; }},
      {"problem.head_dim", "16", "8", [](Problem& p) { p.head_dim = 16; }},
      {"problem.dtype", "bf16", "f32", [](Problem& p) { p.dtype = DType::bf16; }},
      {"problem.intervals_shape", "(1, 1)", "(2, 1)",
       [](Problem& p) { p.intervals_shape = {1, 1}; }},
  };
  for (const auto& [field, got, expected, spoil] : cases) {
    SCOPED_TRACE(field);
    Call call("cpu");
    Problem other = call.data.problem;
    spoil(other);
    const Visibility visibility = call.forward_args.in.visibility;
    GuardedBuffer memory(schedule_size(other, visibility, Direction::forward, in_turn(1), "cpu"),
                         "schedule");
    const Schedule schedule = build_schedule(other, visibility, Direction::forward,
                                             {memory.data(), memory.size()}, call.execution, "cpu");
    call.forward_args.schedule = call.backward_args.schedule = schedule;
    const std::string built_for = "one built for " + field + " ";
    const std::string message = "got " + built_for + got + ", expected " + built_for + expected;
    expect_invalid([&] { call.run_forward(); }, "schedule", message);
    expect_invalid([&] { call.run_backward(); }, "schedule", message);
    call.expect_nothing_written();
  }
}

TEST(InvalidArguments, OfASchedule) {
  Call call("cpu");
  call.backend = "reference";
  expect_invalid([&] { call.run_forward(); }, "schedule",
                 "got one built for backend cpu, expected one built for backend reference");
  call.backend = "cpu";
  ScheduleContents of_the_forward = ScheduleContents::of(call.backward_args.schedule);
  of_the_forward.serves_backward = false;
  call.backward_args.schedule = of_the_forward.schedule();
  expect_invalid([&] { call.run_backward(); }, "schedule",
                 "got one built for direction forward, expected one built for direction backward");
  call.forward_args.schedule = {};
  expect_invalid([&] { call.run_forward(); }, "schedule",
                 "got none, expected the schedule of the intervals, as backend \"cpu\" needs it "
                 "(build_schedule)");
  call.expect_nothing_written();
  call.backend = "reference";  // needs none
  EXPECT_NO_THROW(call.run_forward());
}

TEST(InvalidArguments, OfARowsDtype) {
  Call call("cpu");
  double wide = 0;
  call.forward_args.lse = &wide;
  expect_invalid([&] { call.run_forward(); }, "lse",
                 "got f64, expected f32 with problem.dtype f32");
  call.backward_args.lse_low = &wide;
  expect_invalid([&] { call.run_backward(); }, "lse_low",
                 "got f64, expected f32 with problem.dtype f32");
  call.expect_nothing_written();
}

TEST(InvalidArguments, OfAForgottenScale) {
  Call call("cpu");
  call.forward_args.problem.scale = Problem{}.scale;
  expect_invalid([&] { call.run_forward(); }, "problem.scale", "got nan, expected a finite number");
  call.expect_nothing_written();
}

struct BadOutput {
  std::string argument;
  std::string message;
  void (*spoil)(BackwardArgs&);
};

TEST(InvalidArguments, OfForwardOutputs) {
  Call call;
  call.forward_args.out.data = nullptr;
  expect_invalid([&] { call.run_forward(); }, "out",
                 "got null data, expected data of shape (2, 5, 4, 8)");
  call.forward_args.out = call.results.out.view();
  call.forward_args.out.stride[2] = 0;
  expect_invalid(
      [&] { call.run_forward(); }, "out",
      "got strides (160, 32, 0, 1) for shape (2, 5, 4, 8), expected an output whose elements "
      "do not overlap");
  call.forward_args.out = call.results.out.view();
  call.forward_args.lse = nullptr;
  expect_invalid([&] { call.run_forward(); }, "lse",
                 "got null data, expected data of shape (2, 4, 5)");
  call.expect_nothing_written();
}

TEST(InvalidArguments, OfBackward) {
  const std::vector<BadOutput> cases = {
      {"out", "got null data, expected data of shape (2, 5, 4, 8)",
       [](BackwardArgs& args) { args.out.data = nullptr; }},
      {"lse", "got null data, expected data of shape (2, 4, 5)",
       [](BackwardArgs& args) { args.lse = nullptr; }},
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
  for (const auto& [argument, message, spoil] : cases) {
    SCOPED_TRACE(argument + ": " + message);
    Call call;
    spoil(call.backward_args);
    expect_invalid([&] { call.run_backward(); }, argument, message);
    call.expect_nothing_written();
  }
}

TEST(InvalidArguments, OfTheExecution) {
  Call call("reference");
  const std::size_t needed = forward_workspace_size(call.forward_args, call.execution, "reference");
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
  expect_invalid([&] { forward_workspace_size(call.forward_args, call.execution); },
                 "execution.workers", "got 0, expected at least 1");
  expect_invalid([&] { call.run_backward(); }, "execution.workers", "got 0, expected at least 1");
  call.expect_nothing_written();
}

// ---- Legal calls ---------------------------------------------------------------------------------

TEST(LegalArguments, StridesOfSizeOneAreNotUsed) {
  for (const char* backend : {"cpu", "reference"}) {
    Call expected(backend, {{"bias", "1v1k"}, {"mask", "11q1"}, {"intervals_shape", "11"}});
    expected.run_forward();
    expected.run_backward();
    Call call(backend, {{"bias", "1v1k"}, {"mask", "11q1"}, {"intervals_shape", "11"}});
    for (Inputs* in : {&call.forward_args.in, &call.backward_args.in}) {
      in->bias.stride[0] = in->bias.stride[2] = 1 << 20;
      in->mask.stride[0] = in->mask.stride[1] = in->mask.stride[3] = 1 << 20;
      in->visibility.intervals.stride_batch = in->visibility.intervals.stride_head = 1 << 20;
    }
    call.backward_args.dbias.stride[0] = call.backward_args.dbias.stride[2] = 1 << 20;
    call.run_forward();
    call.run_backward();
    EXPECT_TRUE(call.results.out.same_bits(expected.results.out));
    EXPECT_TRUE(call.results.dq.same_bits(expected.results.dq));
    EXPECT_TRUE(call.results.dbias.same_bits(expected.results.dbias));
  }
}

// All outputs that have elements are written, with zeros (lse: -inf).
TEST(LegalArguments, EmptyDimensions) {
  const std::vector<CaseWords> empties = {{{"batch", "0"}},
                                          {{"batch", "0"}, {"bias", "1v1k"}},
                                          {{"heads_q", "0"}},
                                          {{"heads_q", "0"}, {"heads_kv", "0"}, {"bias", "b11k"}},
                                          {{"seqlen_q", "0"}},
                                          {{"seqlen_k", "0"}, {"bias", "bvq1"}},
                                          {{"seqlen_q", "0"}, {"seqlen_k", "0"}, {"bias", "1111"}}};
  for (const char* backend : {"cpu", "reference"}) {
    for (CaseWords words : empties) {
      words.merge(CaseWords{{"intervals", "none"}, {"mask", "none"}});
      std::string trace = backend;
      for (const auto& [column, word] : words) trace += " " + column + "=" + word;
      SCOPED_TRACE(trace);
      const Data data(case_from(Call::with_defaults(words)));
      RunOptions options;
      options.backend = backend;
      const Results results = run(data, options);
      const auto expect_all = [](const Tensor& tensor, double expected) {
        tensor.for_each(
            [&](const Index&, double value) { EXPECT_EQ(value, expected) << tensor.name(); });
      };
      expect_all(results.out, 0);
      expect_all(results.lse, -std::numeric_limits<double>::infinity());
      for (const Tensor* tensor : {&results.dq, &results.dk, &results.dv, &results.dbias}) {
        expect_all(*tensor, 0);
      }
    }
  }
}

TEST(LegalArguments, DefaultScale) {
  EXPECT_EQ(default_scale(64), 0.125f);
  EXPECT_FLOAT_EQ(default_scale(80), 1 / std::sqrt(80.0f));
}

}  // namespace
}  // namespace flash_dmattn::testing
