"""Softmax does not change when a number is added to all biases of a row. Results then keep their digits as well."""

from dataclasses import replace

import pytest
import torch

from flash_dmattn import flash_dmattn_func, flex_dmattn_func, triton_dmattn_func
from flash_dmattn.check.oracle import Problem, Result, attention
from gpu import on_cpu, on_gpu
from problem_calls import assert_matches_oracle

# numpy warns of inf in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ON_GPU = torch.cuda.is_available()
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
# The interpreter multiplies bf16 wrongly. Uncompiled FlexAttention is torch's own arithmetic, with its backward on GPUs only.
OTHERS = [FLOAT, BFLOAT, HALF] if ON_GPU else [FLOAT, HALF]
DTYPES = {"cpu": [FLOAT, BFLOAT, HALF], "flex": OTHERS, "triton": OTHERS}
FORMS = ["keys", "elements", "few queries"]
# The dtype decides how numbers are rounded, the form of the bias which number is subtracted. Backends that are slow here have
# every form in float32 alone.
CALLS = [
    (backend, dtype, form)
    for backend in DTYPES
    for dtype in DTYPES[backend]
    for form in FORMS
    if backend == "cpu" or ON_GPU or dtype == FLOAT or form == "keys"
]


@pytest.fixture(autouse=True)
def flex_compiles_on_a_gpu(request):
    if not ON_GPU:
        request.getfixturevalue("uncompiled_flex")


def make_problem(form, dtype, backend):
    """The biases are multiples of 1/8, so that shifted ones are exact in float32."""
    torch.manual_seed(0)
    length = 40 if backend == "triton" and not ON_GPU else 200
    queries = 3 if form == "few queries" else length
    heads, head_dim = (2, 1, 1, 2), 64 if ON_GPU else 16
    lengths = (queries, length, length, queries)
    q, k, v, dout = (
        torch.randn(1, n, h, head_dim).to(dtype) for n, h in zip(lengths, heads, strict=True)
    )
    rows = queries if form == "elements" else 1
    bias = (8 * torch.randn(1, 1, rows, length)).round() / 8
    return Problem(q, k, v, dout, bias=bias, causal=True)


def attend(problem, backend):
    call = {"triton": triton_dmattn_func, "flex": flex_dmattn_func}.get(backend, flash_dmattn_func)
    moved = on_gpu(problem) if ON_GPU and backend != "cpu" else problem
    leaves = [t.detach().requires_grad_() for t in (moved.q, moved.k, moved.v, moved.bias)]
    backward = backend != "flex" or ON_GPU
    with torch.set_grad_enabled(backward):
        out, lse = (
            call(
                *leaves[:3],
                attn_bias=leaves[3],
                attn_mask=moved.mask,
                is_causal=True,
                return_lse=backward,
            ),
            None,
        )
        if backward:
            out, lse = out
    gradients = torch.autograd.grad(out, leaves, moved.dout) if backward else (None,) * 4
    return on_cpu(Result(out.detach(), lse if lse is None else lse.detach(), *gradients))


def assert_finite(result):
    for name in ("out", "lse", "dq", "dk", "dv", "dbias"):
        tensor = getattr(result, name)
        assert tensor is None or tensor.isfinite().all(), name


def assert_within(result, problem):
    """Compares what the backend computes with the oracle."""
    assert_finite(result)
    if result.lse is not None:
        return assert_matches_oracle(result, problem)
    expected, yardstick = attention(problem), attention(problem, problem.q.dtype)
    error, bound = ((t.double() - expected.out).abs().max() for t in (result.out, yardstick.out))
    assert error <= 2 * bound + torch.finfo(result.out.dtype).eps


def errors_of(result, exact, rows=slice(None)):
    """Returns the mean and the largest errors of all results but lse, of out and dq in some rows."""
    errors = {}
    for name in ("out", "dq", "dk", "dv", "dbias"):
        if getattr(result, name) is not None:
            error = (getattr(result, name).double() - getattr(exact, name)).abs()
            error = error[:, rows] if name in ("out", "dq") else error
            errors[name] = error.mean().item(), error.max().item()
    return errors


def assert_errors(errors, before, factor):
    """Compares mean errors. The mean of some hundred rounding errors varies by a few percent, for which a fraction of the
    largest one allows."""
    for name, (error, _) in errors.items():
        mean, largest = before[name]
        assert error <= factor * mean + largest / 50, f"{name}: {error} > {factor} * {mean}"


@pytest.mark.parametrize("backend, dtype, form", CALLS)
def test_number_added_to_all_scores_of_a_row_keeps_errors(backend, dtype, form):
    problem = make_problem(form, dtype, backend)
    exact = attention(problem)
    before = errors_of(attend(problem, backend), exact)
    signs = torch.arange(problem.bias.shape[2])[:, None] % 3 - 1  # each row has its own shift
    for shift, factor in ((6_000, 1.1), (-6_000, 1.1), (1e5, 2)):
        shifts = shift * (signs if form == "elements" else 1)
        shifted = attend(replace(problem, bias=problem.bias + shifts), backend)
        assert_errors(errors_of(shifted, exact), before, factor)


@pytest.mark.parametrize("backend, dtype, form", CALLS)
def test_number_added_to_all_scores_leaves_results_finite(backend, dtype, form):
    problem = make_problem(form, dtype, backend)
    far = replace(problem, bias=problem.bias + 2**20)
    assert_within(attend(far, backend), far)
    for shift in (2**24, 1e30):
        assert_finite(attend(replace(problem, bias=problem.bias + shift), backend))


@pytest.mark.parametrize("form", FORMS)
def test_far_scores_of_hidden_keys_and_fills_leave_errors_on_a_cpu(form):
    problem = make_problem(form, FLOAT, "cpu")
    problem.mask = torch.ones(1, 1, 1, problem.k.shape[1], dtype=torch.bool)
    problem.mask[..., 5:9] = False
    before = errors_of(attend(problem, "cpu"), attention(problem))
    for far in (1e9, -1e9):  # which masks nothing
        bias = problem.bias + 1e5
        bias[..., 5:9] = far
        bias[..., 10:12] = -1e9  # without weight
        shifted = replace(problem, bias=bias)
        assert_errors(errors_of(attend(shifted, "cpu"), attention(shifted)), before, 2)


@pytest.mark.parametrize("backend, dtype, form", CALLS)
def test_one_large_score_changes_only_rows_that_see_it(backend, dtype, form):
    problem = make_problem(form, dtype, backend)
    rows = slice(0, 2 * problem.q.shape[1] // 3)
    key = problem.k.shape[1] - problem.q.shape[1] + rows.stop  # seen from the next row on
    before = errors_of(attend(problem, backend), attention(problem), rows)
    for shift in (6_000, 2**24):
        bias = problem.bias.clone()
        bias[..., key] += shift
        one = replace(problem, bias=bias)
        result = attend(one, backend)
        errors = errors_of(result, attention(one), rows)
        assert_errors({n: errors[n] for n in ("out", "dq") if n in errors}, before, 1.1)
        if shift <= 2**20:
            assert_within(result, one)
        assert_finite(result)
