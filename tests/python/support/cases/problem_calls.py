"""Calls of the public function on a problem of the oracle, and comparisons with its results."""

from torch import Tensor

from flash_dmattn import flash_dmattn_func
from flash_dmattn.check.compare import compare_result, compare_tensor
from flash_dmattn.check.oracle import Problem, Result


def forward_and_backward(problem: Problem, function=flash_dmattn_func, **options) -> Result:
    """Runs forward and backward. All inputs require gradients. Mask and bias are passed as 4-d, as in the problem."""
    q, k, v = (t.detach().requires_grad_() for t in (problem.q, problem.k, problem.v))
    bias = None if problem.bias is None else problem.bias.detach().requires_grad_()
    out, lse = function(
        q, k, v, attn_mask=problem.mask, attn_bias=bias, is_causal=problem.causal,
        return_lse=True, **options,
    )  # fmt: skip
    out.backward(problem.dout)
    return Result(out, lse, q.grad, k.grad, v.grad, None if bias is None else bias.grad)


def assert_close(
    name: str, actual: Tensor, expected: Tensor, yardstick: Tensor, largest_score: float = 1.0
) -> None:
    verdict = compare_tensor(name, actual, expected, yardstick, largest_score)
    assert verdict.passed, verdict.message


def assert_matches_oracle(actual: Result, problem: Problem, saturate: bool = True) -> None:
    for verdict in compare_result(actual, problem, saturate):
        assert verdict.passed, verdict.message
