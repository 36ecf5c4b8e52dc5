"""Tests the FlexAttention backend as far as torch's FlexAttention supports it, which on the CPU is only the forward."""

from functools import partial

import pytest
import torch

from flash_dmattn import flash_dmattn_func, flex_dmattn_func, select_key_intervals
from flash_dmattn.check.cases import CASES, make_case, run
from flash_dmattn.check.oracle import Problem, attention
from flash_dmattn.check.run import is_refusal
from gpu import on_cpu, on_gpu
from largest_tensor import LargestTensor
from nonfinite_table import ROWS, expected, make_inputs
from nonfinite_table import assert_close as assert_like_the_table
from problem_calls import assert_close, assert_matches_oracle
from rules_by_definition import causal_elements

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
needs_gpu = pytest.mark.skipif(
    not ON_GPU, reason="torch's FlexAttention has its backward on GPUs only"
)


@pytest.mark.parametrize("intervals", [True, False])
def test_forward_matches_oracle(request, intervals):
    if not intervals:
        request.getfixturevalue("compiled_on_gpu")
    q, k, v = (torch.randn(2, n, h, 40) for n, h in ((140, 4), (210, 2), (210, 2)))
    bias = torch.randn(2, 2, 210)
    bias[:, :, 7:20] = torch.finfo(torch.float32).min
    chosen = select_key_intervals(bias, 30, query_length=140) if intervals else None
    mask = None if intervals else torch.rand(1, 4, 140, 210) < 0.6
    problem = Problem(
        q, k, v, mask=mask, bias=bias[:, :, None], causal=not intervals,
        shown=chosen.to_mask() if intervals else None, softcap=0.0 if intervals else 2.0,
    )  # fmt: skip
    with torch.no_grad():
        out = flex_dmattn_func(
            q, k, v, mask, bias, is_causal=problem.causal, softcap=problem.softcap,
            key_intervals=chosen,
        )  # fmt: skip
    expected, yardstick = attention(problem), attention(problem, torch.float32)
    assert_close("out", out, expected.out, yardstick.out, expected.largest_score)


@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize(
    "bias_dtype, value, masks",
    [(torch.float32, -2e4, False), (torch.float16, -9.9e3, False), (torch.float16, -1e4, True)],
)
def test_row_of_low_biases_is_hidden_by_their_dtype(bias_dtype, value, masks):
    q, v = torch.zeros(1, 3, 2, 16, dtype=torch.float16), torch.randn(1, 5, 2, 16).half()
    bias = torch.full((1, 2, 5), value, dtype=bias_dtype)
    out = flex_dmattn_func(q, v, v, attn_bias=bias)
    expected = torch.zeros_like(out) if masks else v.mean(1, keepdim=True).expand_as(out)
    torch.testing.assert_close(out, expected)


@pytest.mark.skipif(ON_GPU, reason="GPUs have the backward")
def test_backward_on_cpu_raises():
    q = torch.randn(1, 20, 2, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="no backward on the CPU"):
        flex_dmattn_func(q, q, q)


def test_lengths_beyond_torchs_limit_are_compiled_without_a_change_of_its_settings(monkeypatch):
    config, limits = torch._dynamo.config, []

    def backend(graph, inputs):
        limits.append((config.recompile_limit, config.fail_on_recompile_limit_hit))
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    with config.patch(recompile_limit=3):
        for length in [*range(20, 25), 20]:
            x = torch.randn(1, length, 2, 16, device=DEVICE)
            with torch.no_grad():
                torch.testing.assert_close(flex_dmattn_func(x, x, x), flash_dmattn_func(x, x, x))
    assert limits == [(3, config.fail_on_recompile_limit_hit)] * 5


def test_unsupported_flex_call_raises_reason():
    q = torch.randn(1, 20, 2, 16, device=DEVICE)
    with pytest.raises(TypeError, match="float64"):
        flex_dmattn_func(*(q.double(),) * 3)
    with pytest.raises(
        ValueError, match="query, key: got shapes .*, expected no dimension of size 0"
    ):
        flex_dmattn_func(q, q[:, :0], q[:, :0])
    with pytest.raises(NotImplementedError, match="^nonfinite: got 'propagate'.*flash_dmattn_func"):
        flex_dmattn_func(q, q, q, nonfinite="propagate")


# The rows have no second infinite term, because flex adds infinite terms by their signs.
@pytest.mark.usefixtures("compiled_on_gpu")
@pytest.mark.parametrize("row", [r for r in ROWS if "inf - inf" not in r and r != "q and k = inf"])
def test_saturated_nonfinite_inputs_match_rule(row):
    """The results follow the table of docs/numerics.md."""
    inputs = make_inputs(row, 41, 16, torch.float32, DEVICE)
    leaves = [inputs[name].requires_grad_(ON_GPU) for name in ("q", "k", "v", "bias")]
    out = flex_dmattn_func(*leaves[:3], attn_bias=leaves[3])
    with torch.no_grad():
        inputs["v"].copy_(limited(inputs["v"]))
        assert_like_the_table(f"{row}: out", out.detach(), expected(inputs)[0], torch.float32)
    if ON_GPU:
        for gradient in torch.autograd.grad(out, leaves, inputs["dout"]):
            assert gradient.isfinite().all()


def limited(x):
    largest = torch.finfo(x.dtype).max
    return x.nan_to_num(largest, largest, -largest)


LENGTH = 200


def inputs_and_results(mask, wrong):
    """Returns out and, on a GPU, dq, dk and dv. wrong: the wrong values of q, k, v and dout, and their places."""
    torch.manual_seed(1)
    tensors = [torch.randn(1, LENGTH, h, 64, device=DEVICE) for h in (4, 2, 2, 4)]
    for tensor, changes in zip(tensors, wrong, strict=True):
        for rows, value in changes:
            tensor[:, rows] = value
    *leaves, dout = tensors
    leaves = [t.requires_grad_(ON_GPU) for t in leaves]
    results = []
    for function in (flex_dmattn_func, flash_dmattn_func):
        out = function(*leaves, attn_mask=mask, is_causal=True)
        gradients = torch.autograd.grad(out, leaves, dout) if ON_GPU else ()
        results.append([out.detach(), *gradients])
    return results


@pytest.mark.usefixtures("compiled_on_gpu")
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("of", ["q", "k", "v", "dout"])
def test_rows_that_do_not_see_a_nonfinite_value_keep_their_results(of, value):
    wrong = [[(130, value)] if name == of else [] for name in ("q", "k", "v", "dout")]
    # A mask keeps it to one compiled function. If v is wrong there is no mask, because values must also saturate without one.
    everything = torch.ones(1, LENGTH, dtype=torch.bool, device=DEVICE)
    got, wanted = inputs_and_results(None if of == "v" else everything, wrong)
    for tensor in got:
        assert tensor.isfinite().all()
    # out and dq of earlier rows equal the results of finite inputs.
    for result, tensor in enumerate(got[:2]):
        torch.testing.assert_close(tensor[:, :130], wanted[result][:, :130], rtol=1e-2, atol=1e-2)
    if of in ("q", "dout"):  # dk and dv of keys after it
        for result, tensor in enumerate(got[2:], 2):
            torch.testing.assert_close(
                tensor[:, 131:], wanted[result][:, 131:], rtol=1e-2, atol=1e-2
            )


@pytest.mark.parametrize("kind", ["intervals", "causality", "causality and a mask"])
def test_block_mask_lists_visible_blocks_and_needs_no_quadratic_tensor(kind):
    from flash_dmattn._backends.flex import _blocks
    from flash_dmattn.keys.visible import Visible

    length_q, length_k = 1700, 2000
    q, k = torch.empty(1, 2, length_q, 16), torch.empty(1, 2, length_k, 16)
    intervals = select_key_intervals(torch.randn(1, 1, length_k), 50, query_length=length_q)
    mask = torch.ones(1, 1, 1, length_k, dtype=torch.bool) if "mask" in kind else None
    visible = Visible(intervals=intervals) if kind == "intervals" else Visible(mask, True)
    with LargestTensor() as largest:
        partial_count, partial, full_count, full = _blocks(q, k, None, visible)
    assert largest.elements <= 2 * length_k
    shown = causal_elements(length_q, length_k)
    shown = intervals.to_mask()[0, 0] if kind == "intervals" else shown
    for row, elements in enumerate(shown.split(128)):
        for column, block in enumerate(elements.split(128, dim=1)):
            listed_partial = column in partial[0, 0, row, : partial_count[0, 0, row]]
            listed_full = column in full[0, 0, row, : full_count[0, 0, row]]
            whole = mask is None and block.all() and block.shape == (128, 128)
            assert listed_full == whole and (listed_partial or listed_full or not block.any())


# torch decides how numbers beyond fp32 inside a score behave. Without a GPU one name is skipped.
@needs_gpu
@pytest.mark.parametrize(
    "name", [n for n, row in CASES.items() if row["inputs"] != "limits"][: None if ON_GPU else 1]
)
def test_gpu_case_matches_oracle(name):
    try:
        assert_case(CASES[name])
    except (TypeError, ValueError, NotImplementedError) as error:
        if not is_refusal(error):
            raise
        pytest.skip(str(error))


@needs_gpu
@pytest.mark.parametrize("head_dim", [128, 256])
def test_dense_mask_and_bias_match_oracle(head_dim):
    """torch's default tile sizes for head dim 128 do not fit into an H200's shared memory."""
    assert_case(CASES["mask_bhqk_bias_bhqk_bf16"] | {"head_dim": str(head_dim)})


def assert_case(row):
    case = make_case(row)
    result = on_cpu(run(on_gpu(case), flex_dmattn_func))
    assert_matches_oracle(result, case.problem, saturate=case.nonfinite == "saturate")
