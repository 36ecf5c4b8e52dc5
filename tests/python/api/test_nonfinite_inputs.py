"""inf and NaN in q, k, v, bias and dout either propagate to defined results or saturate by the documented rule."""

import itertools

import pytest
import torch

from flash_dmattn import (
    KeyIntervals,
    flash_dmattn_func_auto,
    flex_dmattn_func,
    sliding_window,
    triton_dmattn_func,
)
from flash_dmattn.flash_dmattn_interface import flash_dmattn_func
from gpu import where_there_is_a_gpu
from nonfinite_table import ROWS, assert_row

SQ, D = 41, 16
VALUES = [torch.inf, -torch.inf, torch.nan]
BACKENDS = {
    "cpu": flash_dmattn_func,
    "reference": flash_dmattn_func_auto("reference"),
    "triton": triton_dmattn_func,
}
# (query heads, key heads). Interpreted Triton takes time in proportion to the heads, so it gets few; its case
# table has all group sizes.
HEADS = {"cpu": (4, 2), "reference": (4, 2), "triton": (2, 1)}
backends = pytest.mark.parametrize("backend", BACKENDS)


def device_of(backend):
    return "cuda" if backend in ("triton", "flex", "cuda") and torch.cuda.is_available() else "cpu"


def make_inputs(dtype, query_heads, key_heads):
    inputs = {
        "q": torch.randn(1, SQ, query_heads, D),
        "k": torch.randn(1, SQ, key_heads, D),
        "v": torch.randn(1, SQ, key_heads, D),
        "bias": torch.randn(1, query_heads, SQ),
        "dout": torch.randn(1, SQ, query_heads, D),
    }
    return {name: t.to(dtype) for name, t in inputs.items()}


def visibility(kind):
    """Returns the options of a call, and which elements they show, bool [Sq, Sk]."""
    row, key = torch.arange(SQ)[:, None], torch.arange(SQ)
    if kind == "causal":
        return {"is_causal": True}, key <= row
    if kind == "window":
        return {"key_intervals": sliding_window(SQ, 7)}, (key <= row) & (row - key < 7)
    mask = torch.rand(SQ, SQ) < 0.5
    return {"attn_mask": mask[None, None], "is_causal": True}, mask & (key <= row)


def expected_positions(inputs, shown):
    """Returns masks of the elements of out, lse, dq, dk, dv and dbias that must be non-finite."""
    query_heads, key_heads = inputs["q"].shape[2], inputs["k"].shape[2]
    group = query_heads // key_heads
    wrong = {name: ~t.float()[0].isfinite() for name, t in inputs.items()}
    q, dout = (wrong[name].transpose(0, 1) for name in ("q", "dout"))  # [H, S, D]
    k, v = (wrong[name].transpose(0, 1).repeat_interleave(group, 0) for name in ("k", "v"))
    shown = shown & (inputs["bias"][0][:, None] > torch.finfo(torch.float16).min)  # NaN masks
    unknown = q.any(-1)[:, :, None] | k.any(-1)[:, None] | wrong["bias"][:, None]
    rows = (unknown & shown).any(-1)  # [H, Sq]

    def meets(elements, columns):
        return (elements.float() @ columns.float()) > 0

    out = rows[..., None] | meets(shown, v)
    ds = rows | out.any(-1) | dout.any(-1)
    ds = shown & (ds[:, :, None] | v.any(-1)[:, None])
    dq = ds.any(-1)[..., None].expand(-1, -1, D)
    dk = ds.any(1)[..., None].expand(-1, -1, D)
    dv = meets(shown.mT, rows[..., None] | dout)
    dk, dv = (t.unflatten(0, (key_heads, group)).any(1) for t in (dk, dv))
    return [t.transpose(0, 1)[None] for t in (out, dq, dk, dv)] + [rows[None], ds.any(1)[None]]


@backends
@pytest.mark.parametrize("kind", ["causal", "window", "mask"])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "dout"])
def test_propagate_reaches_only_results_of_visible_elements(name, kind, backend):
    wrong_values = [(torch.float32, value) for value in VALUES]
    if backend == "triton":  # interpreted, it is slow, and multiplies bf16 wrongly
        wrong_values = [(torch.float32, torch.nan)]
        if kind == "causal":  # the others are the same kernels with other visible elements
            wrong_values = [(torch.float32, torch.inf), (torch.float16, torch.nan)]
            if name == "bias":  # where it masks; elsewhere it acts like inf
                wrong_values.append((torch.float32, -torch.inf))
    else:
        wrong_values += itertools.product((torch.float16, torch.bfloat16), VALUES)
    for dtype, value in wrong_values:
        inputs = make_inputs(dtype, *HEADS[backend])
        at = (0, -1, 20) if name == "bias" else (0, 20, -1, 3)
        inputs[name][at] = value
        options, shown = visibility(kind)
        q, k, v, bias = (inputs[n].requires_grad_() for n in ("q", "k", "v", "bias"))
        out, lse = BACKENDS[backend](
            q, k, v, attn_bias=bias, nonfinite="propagate", return_lse=True, **options
        )
        gradients = torch.autograd.grad(out, (q, k, v, bias), inputs["dout"])
        with torch.no_grad():
            expected = expected_positions(inputs, shown)
        results = (out, *gradients[:3], lse, gradients[3])
        names = ("out", "dq", "dk", "dv", "lse", "dbias")
        for result_name, result, wrong in zip(names, results, expected, strict=True):
            hidden = (result == -torch.inf) if result_name == "lse" else False
            different = (~result.isfinite() & ~torch.as_tensor(hidden)) != wrong
            assert not different.any(), (dtype, value, result_name, different.nonzero()[0])
            if name in ("q", "k", "bias") or value != value:
                infinite = wrong & ~result.isnan()
                assert not infinite.any(), (dtype, value, result_name, infinite.nonzero()[0])


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "dlse"])
@pytest.mark.parametrize("length", [5, 100])
def test_nan_with_all_bits_set_propagates(length, name):
    """A vector comparison produces such a NaN, and rounding it in integer arithmetic may carry into the sign."""
    all_ones = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    positions = []
    for nan in (torch.tensor(torch.nan), all_ones):
        torch.manual_seed(0)
        inputs = {n: torch.randn(1, length, 2, D) for n in ("q", "k", "v", "dout")}
        inputs["dlse"] = torch.randn(1, 2, length)
        inputs[name].view(-1)[2] = nan
        leaves = [inputs[n].requires_grad_() for n in ("q", "k", "v")]
        results = flash_dmattn_func(*leaves, is_causal=True, return_lse=True, nonfinite="propagate")
        gradients = torch.autograd.grad(results, leaves, (inputs["dout"], inputs["dlse"]))
        positions.append([t.isfinite() for t in (*results, *gradients)])
    assert all(map(torch.equal, *positions)) and not all(t.all() for t in positions[0])


def attend(backend):
    def out_and_lse(q, k, v, bias):
        return flash_dmattn_func(q, k, v, attn_bias=bias, return_lse=True, backend=backend)

    return out_and_lse


# (dtype, (length, head dim)) of calls; 41 queries count as few.
LOW, ALL = [torch.float16, torch.bfloat16], [torch.float32, torch.float16, torch.bfloat16]
CALLS = {
    "cpu": [*itertools.product(ALL, [(41, 16), (100, 16)])],
    "reference": [*itertools.product(ALL, [(41, 16)])],
    "triton": [(torch.float32, (41, 64)), (torch.float32, (200, 64))],
    "cuda": [*itertools.product(LOW, [(41, 64), (200, 64), (200, 128), (200, 256)])],
}


@pytest.mark.parametrize(
    "backend", ["cpu", "reference", *(where_there_is_a_gpu("triton", "cuda") or ["triton"])]
)
@pytest.mark.parametrize("row", ROWS)
def test_saturated_nonfinite_inputs_match_rule(row, backend):
    """The table of docs/numerics.md."""
    call, device = attend(backend), device_of(backend)
    if backend == "triton" and device == "cpu":
        # Interpreted, it is slow, and multiplies bf16 wrongly.
        heads = HEADS[backend]
        assert_row(call, row, torch.float32, heads=heads, backward="dout" in ROWS[row])
        if ROWS[row].keys() & {"v", "dout"}:  # the limit is the dtype's
            assert_row(call, row, torch.float16, heads=heads, backward="dout" in ROWS[row])
        return
    for dtype, (length, head_dim) in CALLS[backend]:
        assert_row(call, row, dtype, length=length, head_dim=head_dim, device=device)


@pytest.mark.parametrize(
    "gap, dtype, backend",
    [(gap, torch.float32, backend) for gap in (200.0, 5000.0) for backend in ("cpu", "reference")]
    + [(200.0, torch.float16, backend) for backend in BACKENDS]
    + [(5000.0, torch.float32, "triton")],
)
def test_visible_element_of_zero_probability_propagates(gap, dtype, backend):
    """The precision of a backend decides where a probability underflows, but not which elements are visible."""

    def results(nonfinite, hidden=False, **wrong):
        q, dout = torch.ones(2, 1, 5, 1, 8, dtype=dtype)
        k, v = torch.ones(2, 1, 3, 1, 8, dtype=dtype)
        bias = torch.tensor([[[-gap, 0.0, -torch.inf if hidden else -gap]]], dtype=dtype)
        v[0, 2, 0, 3] = wrong.get("v", 1)
        dout[0, 2, 0, 3] = wrong.get("dout", 1)
        leaves = [t.requires_grad_() for t in (q, k, v, bias)]
        out = BACKENDS[backend](q, k, v, attn_bias=bias, nonfinite=nonfinite)
        return [t.isfinite() for t in (out, *torch.autograd.grad(out, leaves, dout))]

    for value in VALUES:
        assert all(t.all() for t in results("saturate", v=value, dout=value))
        assert all(t.all() for t in results("propagate", hidden=True, v=value))
        out, *gradients = results("propagate", v=value)
        assert not out[..., 3].any() and out.sum() == 5 * 7
        dq, dk, dv, dbias = (t.any() for t in gradients)
        assert not (dq or dk or dbias) and dv
        out, dq, dk, dv, dbias = results("propagate", dout=value)
        assert out.all() and not (dk.any() or dbias.any() or dv[..., 3].any())
        assert dq.sum() == 4 * 8 and dv.sum() == 3 * 7
        out, dq, dk, dv, dbias = results("propagate", hidden=True, dout=value)
        assert dk[:, 2].all() and dv[:, 2].all() and not dk[:, :2].any()


@pytest.mark.parametrize(
    "backend, nonfinite",
    [*itertools.product(BACKENDS, ["saturate", "propagate"]), ("flex", "saturate")],
)
@pytest.mark.parametrize("hidden_by", ["mask", "intervals"])
def test_hidden_keys_of_any_value_change_nothing(hidden_by, backend, nonfinite, compiled_on_gpu):
    """The hidden keys act as uninitialised padding."""
    inputs = make_inputs(torch.float32, *HEADS.get(backend, (4, 2)))
    *leaves, dout = (inputs[name].to(device_of(backend)) for name in inputs)
    intervals = torch.tensor([0, SQ], dtype=torch.int32).repeat(1, 1, SQ, 1)
    intervals[:, :, 5:9] = 0
    shown = {"key_intervals": KeyIntervals(intervals.to(dout.device), SQ)}
    if hidden_by == "mask":
        shown = {"attn_mask": intervals[0, :, :, 1].to(dout.device) > 0}
    if nonfinite != "saturate":
        shown["nonfinite"] = nonfinite
    results = []
    for values in ((0, 0), (torch.inf, torch.nan)):
        for tensor in leaves[1:3]:
            tensor[:, 5:7], tensor[:, 7:9] = values
        has_backward = backend != "flex" or dout.is_cuda
        copies = [t.clone().requires_grad_(has_backward) for t in leaves]
        function = flex_dmattn_func if backend == "flex" else BACKENDS[backend]
        out = function(*copies[:3], attn_bias=copies[3], **shown)
        gradients = torch.autograd.grad(out, copies, dout) if has_backward else ()
        results.append([out.detach(), *gradients])
    assert all(t.isfinite().all() for t in results[1])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
