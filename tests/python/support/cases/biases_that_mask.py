"""Biases near the mask value of their dtype, in every form that attention accepts."""

import torch

from flash_dmattn.check.cases import to_device
from flash_dmattn.check.oracle import Problem, attention
from problem_calls import assert_close, assert_matches_oracle, forward_and_backward
from rules_by_definition import causal_elements, select

# The forms of a call: a key bias, a dense bias, and keys selected by the bias or by separate scores.
FORMS = ("keys", "elements", "chosen keys", "keys beside scores", "elements beside scores")
WINDOW = 9


def mask_value(dtype):
    return -1e4 if dtype == torch.float16 else -1e30


def bias_around_mask_value(*shape, dtype):
    """Draws normal numbers, some values that mask, and low values that do not mask."""
    masking = [mask_value(dtype), torch.finfo(dtype).min, -torch.inf, torch.nan]
    low = [0.99 * mask_value(dtype)]
    if dtype != torch.float16:
        low += [-2e4, -65504.0]
    special = torch.tensor(masking + low, dtype=torch.float64)
    special = special[torch.randint(len(special), shape)]
    normal = torch.randn(shape, dtype=torch.float64)
    return torch.where(torch.rand(shape) < 0.6, special, normal).to(dtype)


def problem_of(form, dtype, bias_dtype, lengths=(24, 64)):
    """Returns a problem in which every query sees a few normal biases, and the options of the call."""
    length_q, length_k = lengths
    q, k, v, dout = (
        torch.randn(1, length, heads, 16).to(dtype)
        for length, heads in ((length_q, 4), (length_k, 2), (length_k, 2), (length_q, 4))
    )
    rows = length_q if form.startswith("elements") else 1
    bias = bias_around_mask_value(1, 2, rows, length_k, dtype=bias_dtype)
    problem = Problem(q, k, v, dout, bias=bias, causal=True)
    causal = causal_elements(length_q, length_k).expand(1, 2, -1, -1)
    if form == "chosen keys":
        problem.shown = select(bias[:, :, 0].double(), WINDOW, causal)
        return problem, {"keep_window_size": WINDOW}
    if form.endswith("beside scores"):
        scores = torch.randn(1, 2, length_k)
        problem.shown = select(scores, WINDOW, causal & (bias.double() > mask_value(bias_dtype)))
        return problem, {"keep_window_size": WINDOW, "selection_scores": scores}
    return problem, {}


def check_bias_that_masks(
    function, form, dtype, bias_dtype, device="cpu", lengths=(24, 64), has_backward=True
):
    """Compares forward and, if the function has one, backward with the oracle."""
    problem, choice = problem_of(form, dtype, bias_dtype, lengths)
    problem = to_device(problem, device)
    if "selection_scores" in choice:
        choice["selection_scores"] = choice["selection_scores"].to(device)
    if has_backward:
        assert_matches_oracle(forward_and_backward(problem, function, **choice), problem)
        return
    with torch.no_grad():
        out = function(
            problem.q, problem.k, problem.v, attn_bias=problem.bias, is_causal=True, **choice
        )
    expected, yardstick = attention(problem), attention(problem, dtype)
    assert_close("out", out, expected.out, yardstick.out, expected.largest_score)
