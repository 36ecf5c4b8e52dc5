#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "support/call.h"
#include "support/compare.h"
#include "support/instruction_sets.h"

// A call decides once: its size, its kernel and what it runs are of one plan, which copies of the call share.
namespace flash_dmattn::testing {
namespace {

class CheckedCalls : public ::testing::TestWithParam<const char*> {};

TEST_P(CheckedCalls, CopyOutlivesTheOriginal) {
  Call expected(GetParam());
  expected.run_forward();
  expected.run_backward();
  Call call(GetParam());
  auto forward = std::make_unique<ForwardCall>(call.forward_args, call.execution, GetParam());
  const ForwardCall forward_copy = *forward;
  EXPECT_EQ(forward_copy.workspace_size(), forward->workspace_size());
  EXPECT_EQ(forward_copy.kernel_name(), forward->kernel_name());
  forward.reset();
  run_in_new_workspace(forward_copy);
  auto backward = std::make_unique<BackwardCall>(call.backward_args, call.execution, GetParam());
  const BackwardCall backward_copy = std::move(*backward);
  backward.reset();
  run_in_new_workspace(backward_copy);
  expect_same_bits(call.results, expected.results);
}

TEST_P(CheckedCalls, SecondRunEqualsTheFirst) {
  Call expected(GetParam());
  expected.run_forward();
  Call call(GetParam());
  const ForwardCall forward(call.forward_args, call.execution, GetParam());
  for (int i = 0; i < 2; ++i) {
    run_in_new_workspace(forward);
    EXPECT_TRUE(call.results.out.same_bits(expected.results.out));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, CheckedCalls, ::testing::Values("cpu", "reference"));

TEST(Calls, LaterChoiceOfInstructionSetChangesNoPlan) {
  on_each_instruction_set([] {
    Call expected;
    expected.run_forward();
    const Call call;
    const ForwardCall forward(call.forward_args, call.execution, "cpu");
    const std::string kernel = forward.kernel_name();
    const std::size_t size = forward.workspace_size();
    const cpu::Candidate& planned = cpu::chosen_instruction_set();
    for (const cpu::Candidate& candidate : cpu::allowed_instruction_sets()) {
      cpu::choose_instruction_set(candidate);
      EXPECT_EQ(forward.kernel_name(), kernel);
      EXPECT_EQ(forward.workspace_size(), size);
      run_in_new_workspace(forward);
      EXPECT_TRUE(call.results.out.same_bits(expected.results.out))
          << "while " << cpu::name_of(candidate.isa);
    }
    cpu::choose_instruction_set(planned);
  });
}

// The CPU sizes a call's tile lists by its intervals.
TEST(Calls, IntervalsThatGrowAfterTheCallWasMadeThrow) {
  Call call("cpu");
  const auto show = [&](std::int32_t queries) {
    std::fill(call.data.intervals.begin(), call.data.intervals.end(), KeyInterval{0, queries});
  };
  show(0);
  const ForwardCall forward(call.forward_args, call.execution, "cpu");
  const BackwardCall backward(call.backward_args, call.execution, "cpu");
  show(5);
  const std::string message =
      "got 14 keys in all tiles, expected at most 0, as when the call was made";
  expect_invalid([&] { run_in_new_workspace(forward); }, "visibility.intervals", message);
  expect_invalid([&] { run_in_new_workspace(backward); }, "visibility.intervals", message);
  call.expect_nothing_written();
}

// Its tile lists may then have as many entries as before, but more keys, each of which has sums.
TEST(Calls, BackwardWhoseKeysGrowInNumberAfterItWasMadeThrows) {
  Call call("cpu", "seqlen_q=600 seqlen_k=600 causal=0 intervals_shape=11");
  const auto show = [&](std::int32_t keys, std::int32_t queries) {
    std::fill(call.data.intervals.begin(), call.data.intervals.end(), KeyInterval{0, 0});
    std::fill_n(call.data.intervals.begin(), keys, KeyInterval{0, queries});
  };
  show(2, 600);
  const BackwardCall backward(call.backward_args, call.execution, "cpu");
  show(20, 1);
  expect_invalid([&] { run_in_new_workspace(backward); }, "visibility.intervals",
                 "got keys that more queries see, expected intervals as when the call was made");
  call.expect_nothing_written();
}

TEST(Calls, SelectCallTakesNoBackend) {
  float score = 0;
  KeyInterval interval;
  const SelectionArgs args{.batch = 1,
                           .heads = 1,
                           .seqlen_q = 1,
                           .seqlen_k = 1,
                           .rule = {.window = 1},
                           .scores = &score,
                           .scores_dtype = DType::f32,
                           .intervals = &interval};
  run_in_new_workspace(SelectCall(args, sequential_execution(1)));
  EXPECT_EQ(interval.first, 0);
  EXPECT_EQ(interval.last, 1);
  expect_invalid([&] { SelectCall(args, sequential_execution(1), "cpu"); }, "backend",
                 "got \"cpu\", expected \"\", as the device of the scores selects");
}

}  // namespace
}  // namespace flash_dmattn::testing
