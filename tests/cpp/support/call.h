#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>

#include "flash_dmattn/flash_dmattn.h"
#include "support/cases.h"
#include "support/compare.h"
#include "support/data.h"
#include "support/run.h"

namespace flash_dmattn::testing {

// A correct call of forward and of backward, which tests then spoil.
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
    backward_args.dlse = data.dlse_values();
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

  void expect_nothing_written() const { expect_same_bits(results, Results(data)); }
};

// Expects `action` to throw InvalidArgument for `argument` with exactly this text after it.
inline void expect_invalid(const std::function<void()>& action, const std::string& argument,
                           const std::string& message) {
  try {
    action();
    ADD_FAILURE() << "nothing thrown for " << argument;
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), argument);
    EXPECT_EQ(error.what(), argument + ": " + message);
  }
}

}  // namespace flash_dmattn::testing
