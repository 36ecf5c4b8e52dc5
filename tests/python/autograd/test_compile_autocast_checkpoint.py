"""The operators work under torch.compile, opcheck, autocast and checkpointing."""

import os

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flash_dmattn import (
    KeyIntervals,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    select_key_intervals,
    sliding_window,
)
from flash_dmattn._core import ops as _ops
from flash_dmattn._core.numerics import Numerics
from flash_dmattn.keys.rule import SelectionRule
from flash_dmattn.keys.visible import Visible
from flash_dmattn.scores import with_zero_sum_gradient
from gpu import devices, where_there_is_a_gpu

ops = torch.ops.flash_dmattn


def tensors(*, seqlen=33, dtype=torch.float32, requires_grad=True, device="cpu"):
    shapes = [*((2, seqlen, heads, 16) for heads in (4, 2, 2)), (2, 2, seqlen)]
    leaves = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]
    return [t.requires_grad_(requires_grad) for t in leaves]


def gradients(function, inputs):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    direction = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    (out.float() * direction).sum().backward()
    return [out.detach(), *(t.grad for t in leaves)]


def assert_same(actual, expected):
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def per_query(q, k, v, b):
    return flash_dmattn_func(q, k, v, attn_bias=b, is_causal=True, keep_window_size=5)


@pytest.mark.parametrize("of", [SelectionRule, Numerics, Visible])
def test_named_tuples_have_only_fields_and_methods(of):
    """torch 2.10 traces neither properties nor class attributes of named tuples."""
    public = {name: member for name, member in vars(of).items() if not name.startswith("_")}
    others = [name for name, member in public.items() if not callable(member)]
    assert others == list(of._fields)


in_release_check = pytest.mark.skipif(
    "FLASH_DMATTN_TEST_RELEASE" not in os.environ, reason="a part of make release-check"
)


@pytest.mark.parametrize(
    "device, dtype",
    [
        pytest.param("cpu", torch.float32, marks=in_release_check),
        *where_there_is_a_gpu(("cuda", torch.bfloat16)),
    ],
)
def test_attention_compiled_with_inductor_equals_eager(device, dtype):
    """The scores have a gradient that sums to 0, like those of layers. Other tests compile forwards with inductor, and backwards
    for other backends; opcheck compares strides, by which inductor compiles."""
    torch._dynamo.reset()
    # In 16 bits, the order in which gradients are added changes a rounding.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if device == "cuda" else {}

    def block(q, k, v, b):
        return per_query(q * 2, k, v.relu(), with_zero_sum_gradient(b - 1)).relu()

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for seqlen in (33, 40):
        inputs = tensors(seqlen=seqlen, dtype=dtype, device=device)
        for got, wanted in zip(gradients(compiled, inputs), gradients(block, inputs), strict=True):
            torch.testing.assert_close(got, wanted, **tolerance)


def test_intervals_pass_into_compiled_function():
    torch._dynamo.reset()
    q, k, v, bias = tensors()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def choose(scores):
        return select_key_intervals(scores, 5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q, k, v, bias, intervals):
        return flash_dmattn_func(q, k, v, attn_bias=bias, key_intervals=intervals)

    intervals = choose(bias)
    assert isinstance(intervals, KeyIntervals)
    expected = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, keep_window_size=5)
    torch.testing.assert_close(attend(q, k, v, bias, intervals), expected, rtol=0, atol=0)


def test_intervals_are_a_pytree():
    intervals = sliding_window(9, 3)
    leaves, structure = torch.utils._pytree.tree_flatten({"a": intervals})
    assert len(leaves) == 1
    restored = torch.utils._pytree.tree_unflatten(leaves, structure)["a"]
    assert restored.query_length == 9 and restored.intervals is intervals.intervals


FORWARD_CASES = {
    "delayed_bias": {"bias": (2, 2, 33), "delay": 6},
    "dense_bias_and_mask": {"bias": (1, 4, 33, 33), "mask": (2, 1, 33, 33)},
    "float32_bias": {"bias": (2, 1, 1, 33), "dtype": torch.bfloat16},
    "transposed_intervals": {"bias": (2, 2, 1, 33), "window": 5, "transposed": True},
    "half": {"dtype": torch.float16, "requires_grad": False},
}


@pytest.mark.parametrize("name", FORWARD_CASES)
def test_forward_operator_passes_opcheck(name):
    case = FORWARD_CASES[name]
    requires_grad = case.get("requires_grad", True)
    q, k, v, scores = tensors(dtype=case.get("dtype", torch.float32), requires_grad=requires_grad)
    if case.get("transposed"):
        q, k, v = (
            t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
            for t in (q, k, v)
        )
    bias = torch.randn(case["bias"]).requires_grad_() if "bias" in case else None
    mask = torch.rand(case["mask"]) < 0.7 if "mask" in case else None
    intervals = select_key_intervals(scores, case["window"]).intervals if "window" in case else None
    bound = [case["window"], 1] if "window" in case else []
    options = (bound, True, case.get("delay", 0), 0.25, 0.0, True, False, "")
    torch.library.opcheck(ops.forward.default, (q, k, v, mask, bias, intervals, *options))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_select_and_attend_passes_opcheck(requires_grad):
    inputs = tensors(requires_grad=requires_grad)
    options = (5, True, 0, 0.25, 0.0, True, False, "")
    torch.library.opcheck(ops.select_and_attend.default, (*inputs, *options))


@pytest.mark.parametrize(
    "needs, bias_dims", [((1, 1, 1, 1), 3), ((1, 1, 1, 1), 4), ((1, 0, 1, 0), 4), ((0, 0, 0, 1), 3)]
)
def test_backward_operator_passes_opcheck(needs, bias_dims):
    q, k, v, scores = tensors(requires_grad=False)
    bias = scores if bias_dims == 3 else scores[:, :, None]
    options = ([], True, 6 * (bias_dims == 3), 0.25, 0.0, True, False, "")
    results = ops.forward(q, k, v, None, bias, None, *options)
    dlse = torch.randn_like(results[1][0]) if bias_dims == 3 else None
    arguments = (torch.randn_like(q), q, k, v, None, bias, None, *results, dlse, *options)
    torch.library.opcheck(ops.backward.default, (*arguments, *map(bool, needs)))


def test_selection_operators_pass_opcheck():
    scores = torch.randn(2, 3, 50)
    for key_mask in (None, torch.rand(2, 1, 50) < 0.7):
        arguments = (scores, key_mask, [7], "per_query", True, 20)
        torch.library.opcheck(ops.select_key_intervals.default, arguments)
        rule = (5, False, 2, -0.5)
        arguments = (scores, key_mask, [7, 0, 60], "per_query", True, 20, *rule)
        torch.library.opcheck(ops.select_key_intervals.default, arguments)


@devices
@pytest.mark.parametrize("dtype, compiled", [(torch.bfloat16, False), (torch.float16, True)])
def test_autocast_casts_inputs(dtype, compiled, device):
    torch._dynamo.reset()
    inputs = [t.to(device) for t in tensors()]

    def attend(*tensors):
        with torch.autocast(device, dtype=dtype):
            return per_query(*tensors)

    function = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    actual = gradients(function, inputs)
    expected = gradients(lambda *t: per_query(*(x.to(dtype) for x in t[:3]), t[3]), inputs)
    assert actual[0].dtype == dtype and all(t.dtype == torch.float32 for t in actual[1:])
    # On a GPU the order of additions varies.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if device == "cuda" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(actual, expected, **tolerance)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_same_gradients(use_reentrant):
    inputs = tensors()
    intervals = sliding_window(33, 7)

    def attend(q, k, v, bias):
        return flash_dmattn_func(q, k, v, attn_bias=bias, key_intervals=intervals)

    def checkpointed(*args):
        return checkpoint(attend, *args, use_reentrant=use_reentrant)

    assert_same(gradients(checkpointed, inputs), gradients(attend, inputs))


def test_results_do_not_depend_on_threads():
    inputs = tensors(seqlen=200)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = gradients(per_query, inputs)
        torch.set_num_threads(3)
        assert_same(gradients(per_query, inputs), expected)
    finally:
        torch.set_num_threads(threads)


def test_compiled_graph_reads_presence_of_cuda_as_a_constant():
    """Every selection on a GPU reads this constant."""
    compiled = torch.compile(lambda x: x + _ops._has_cuda(), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)) == _ops._has_cuda()


@pytest.mark.parametrize("backend", [None, "cpu"])
def test_backends_of_this_machine_are_constants(backend):
    torch._dynamo.reset()
    q, k, v, _ = (t.detach() for t in tensors())
    compiled = torch.compile(
        lambda *t: flash_dmattn_func_auto(backend)(*t), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(q, k, v), flash_dmattn_func(q, k, v))
