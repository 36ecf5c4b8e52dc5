#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string_view>

#include "flash_dmattn/flash_dmattn.h"
#include "support/cases.h"
#include "support/compare.h"
#include "support/data.h"
#include "support/expect_invalid.h"
#include "support/run.h"

namespace flash_dmattn::testing {

// A correct call of forward and of backward, which tests then spoil.
struct Call {
  Data data;
  Results results;
  ForwardArgs forward_args;
  BackwardArgs backward_args;
  Execution execution;
  GuardedBuffer workspace;
  std::string_view backend;

  explicit Call(std::string_view name = "cpu", const CaseWords& words = {})
      : data(case_from(with_defaults(words))), results(data), backend(name) {
    forward_args = testing::forward_args(data, results);
    backward_args = testing::backward_args(data, results);

    execution = sequential_execution(2);
    workspace =
        GuardedBuffer(std::max({ForwardCall(forward_args, execution, backend).workspace_size(),
                                BackwardCall(backward_args, execution, backend).workspace_size(),
                                workspace_alignment}),
                      "workspace");
    execution.workspace = workspace.data();
    execution.workspace_bytes = workspace.size();
  }

  static CaseWords with_defaults(CaseWords words) {
    words.merge(CaseWords(
        "batch=2 heads_q=4 heads_kv=2 seqlen_q=5 seqlen_k=7 head_dim=8 mask=b11k mask_fill=random "
        "bias=bv1k bias_fill=normal intervals=sliding intervals_shape=b1 window=3 causal=1"));
    return words;
  }

  void run_forward() { forward(forward_args, execution, backend); }
  void run_backward() { backward(backward_args, execution, backend); }

  void expect_nothing_written() const { expect_same_bits(results, Results(data)); }
};

}  // namespace flash_dmattn::testing
