#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <utility>

#include "support/call.h"
#include "support/compare.h"
#include "support/instruction_sets.h"

// A call decides once: its size, its kernel and what it runs are of one plan, which copies of the call share.
namespace flash_dmattn::testing {
namespace {

class CheckedCalls : public ::testing::TestWithParam<const char*> {};

TEST_P(CheckedCalls, SizeEqualsThatOfTheFunctions) {
  const Call call(GetParam());
  EXPECT_EQ(ForwardCall(call.forward_args, call.execution, GetParam()).workspace_size(),
            forward_workspace_size(call.forward_args, call.execution, GetParam()));
  EXPECT_EQ(BackwardCall(call.backward_args, call.execution, GetParam()).workspace_size(),
            backward_workspace_size(call.backward_args, call.execution, GetParam()));
}

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

TEST(Calls, CopyOfAScheduleCallBuildsTheSameSchedule) {
  const Call call;
  const Problem& p = call.data.problem;
  std::optional<ScheduleCall> original(std::in_place, p, call.forward_args.in.visibility,
                                       Direction::forward, call.execution, "cpu");
  const ScheduleCall copy = *original;
  EXPECT_EQ(copy.size(), original->size());
  EXPECT_EQ(copy.workspace_size(), original->workspace_size());
  EXPECT_EQ(copy.size(), call.forward_schedule.schedule.bytes());
  original.reset();
  GuardedBuffer memory(copy.size(), "schedule");
  GuardedBuffer workspace(copy.workspace_size(), "workspace");
  const Schedule schedule = copy.build(memory, workspace);
  EXPECT_TRUE(schedule.serves(Direction::forward));
  EXPECT_EQ(schedule.bytes(), copy.size());
}

TEST_P(CheckedCalls, CallOfAScheduleCallEqualsTheSearchedOne) {
  Call expected(GetParam());
  expected.run_forward();
  expected.run_backward();
  Call call(GetParam());
  const auto scheduling = [&](Direction direction) {
    return ScheduleCall(call.data.problem, call.forward_args.in.visibility, direction,
                        call.execution, GetParam());
  };
  const ForwardCall searched(call.forward_args, call.execution, GetParam());
  const ForwardCall forward(call.forward_args, call.execution, scheduling(Direction::forward));
  EXPECT_EQ(forward.kernel_name(), searched.kernel_name());
  EXPECT_EQ(forward.workspace_size(), searched.workspace_size());
  run_in_new_workspace(forward);
  run_in_new_workspace(
      BackwardCall(call.backward_args, call.execution, scheduling(Direction::backward)));
  expect_same_bits(call.results, expected.results);
}

TEST(Calls, ScheduleCallOfAnotherProblemOrDirectionThrows) {
  Call call;
  const ScheduleCall scheduling(call.data.problem, call.forward_args.in.visibility,
                                Direction::forward, call.execution);
  expect_invalid([&] { BackwardCall(call.backward_args, call.execution, scheduling); },
                 "scheduling",
                 "got one for direction forward, expected one for direction backward");
  const auto expect_other = [&](const auto& change) {
    ForwardArgs args = call.forward_args;
    change(args.problem);
    expect_invalid([&] { ForwardCall(args, call.execution, scheduling); }, "scheduling",
                   "got one for another problem, expected one for the problem of the arguments");
  };
  expect_other([](Problem& p) { p.scale *= 2; });
  expect_other([](Problem& p) { p.causal = !p.causal; });
  expect_other([](Problem& p) { p.bias_shape[0] = -1; });
  expect_other([](Problem& p) { p.seqlen_k += 1; });
  call.expect_nothing_written();
}

TEST(Calls, CallOfAScheduleCallChecksItsOtherArguments) {
  Call call;
  const ScheduleCall scheduling(call.data.problem, call.forward_args.in.visibility,
                                Direction::forward, call.execution);
  ForwardArgs args = call.forward_args;
  args.schedule = {};
  expect_invalid([&] { ForwardCall(args, call.execution, scheduling); }, "schedule",
                 "got none, expected the schedule of the intervals, as backend \"cpu\" needs it "
                 "(build_schedule)");
  args = call.forward_args;
  args.in.q.data = nullptr;
  expect_invalid([&] { ForwardCall(args, call.execution, scheduling); }, "q");
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
  run_in_new_workspace(SelectCall(args, in_turn(1)));
  EXPECT_EQ(interval.first, 0);
  EXPECT_EQ(interval.last, 1);
  expect_invalid([&] { SelectCall(args, in_turn(1), "cpu"); }, "backend",
                 "got \"cpu\", expected \"\", as the device of the scores selects");
}

}  // namespace
}  // namespace flash_dmattn::testing
