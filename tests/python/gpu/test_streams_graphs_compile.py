"""The CUDA backend works with torch's streams, devices, graphs, torch.compile and memory."""

import os
from contextlib import contextmanager

import pytest
import torch

from flash_dmattn import (
    KeyIntervals,
    flash_dmattn_func,
    select_key_intervals,
    sliding_window,
)
from flash_dmattn._core import numerics
from gpu import capture
from gpu_calls import (
    FUNCTIONS,
    OFFSETS,
    PACKED,
    assert_close,
    attend,
    gradients,
    gradients_behind_other_work,
    leaves,
)
from python_process import run_python

ops = torch.ops.flash_dmattn


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_do_not_wait_for_the_device(name):
    inputs = leaves()
    gradients(FUNCTIONS[name], inputs)  # kernels are loaded at their first use
    out = torch.ones((), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        copies = [t.detach().clone().requires_grad_() for t in inputs]
        out = FUNCTIONS[name](*copies)
        out.backward(torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graph_replay_equals_eager(name):
    static = leaves()
    dout = torch.randn(static[0].shape, dtype=torch.bfloat16, device="cuda")

    def step():
        return torch.autograd.grad(FUNCTIONS[name](*static), static, dout)

    graph, captured = capture(step)
    for _ in range(3):
        with torch.no_grad():
            for t in static:
                t.normal_()
        graph.replay()
        assert_close(captured, step())


@pytest.mark.parametrize("name", PACKED)
def test_packed_graph_replay_equals_eager(name):
    """A graph of forward and backward is replayed with different values and sequence lengths."""
    static = leaves(batch=1)
    dout = torch.randn(static[0].shape, dtype=torch.bfloat16, device="cuda")
    rows = torch.tensor(OFFSETS, dtype=torch.int32, device="cuda")
    offsets = rows[0].clone()

    def step():
        return torch.autograd.grad(PACKED[name](*static, offsets), static, dout)

    graph, captured = capture(step)
    for row in rows:
        with torch.no_grad():
            offsets.copy_(row)
            for t in static:
                t.normal_()
        graph.replay()
        assert_close(captured, step(), f"gradients of q, k, v, bias at {row.tolist()};")


def bits(tensors):
    return [t.contiguous().view(torch.int16) for t in tensors]


@pytest.mark.parametrize("heads", [(8, 4), (12, 12), (32, 32)])  # 12: several runs of key blocks
@pytest.mark.parametrize("name", FUNCTIONS)
def test_deterministic_gradients_repeat_bit_for_bit(name, heads):
    def function(*t):
        with torch_is_deterministic():
            return FUNCTIONS[name](*t)

    inputs = leaves(seqlen=2000, heads=heads)
    first = bits(gradients(function, inputs))
    for _ in range(19):
        assert all(map(torch.equal, bits(gradients(function, inputs)), first))
    assert_close([t.view(torch.bfloat16) for t in first], gradients(FUNCTIONS[name], inputs))


@contextmanager
def torch_is_deterministic():
    """Turns on torch's deterministic algorithms, which attention follows. The poisoned memory of the tests otherwise overrides the switch."""
    with numerics.default_deterministic(None):
        assert numerics.resolve_deterministic(None)
        yield


@pytest.mark.parametrize(
    "shape", [(2, 2, 1, 1500), (1, 1, 1, 1500), (2, 4, 1500, 1500), (2, 2, 1500, 1500)]
)
def test_bias_gradients_repeat_where_blocks_own_them(shape):
    """Even without deterministic=True, gradients repeat for a key bias and for a dense bias that only two heads of a group share."""
    q, k, v, _ = leaves(seqlen=1500)
    bias = torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dout = torch.randn_like(q)

    def gradient():
        return torch.autograd.grad(attend(q, k, v, bias, deterministic=False), bias, dout)[0]

    first = gradient()
    for _ in range(19):
        assert torch.equal(gradient(), first)


def test_first_calls_of_a_process_can_be_captured():
    """The first call loads kernels and queries the device, also during a capture."""
    program = """
import os
import torch
from gpu_calls import FUNCTIONS, assert_close, leaves

inputs = leaves()
dout = torch.ones_like(inputs[0])
torch.cuda.synchronize()
for function in FUNCTIONS.values():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(function(*inputs), inputs, dout)
    graph.replay()
    assert_close(captured, torch.autograd.grad(function(*inputs), inputs, dout))
os._exit(0)  # at an ordinary end the threads of torch's autograd sometimes abort the process
"""
    cases = os.path.join(os.path.dirname(__file__), "..", "support", "cases")
    path = os.pathsep.join([cases, *filter(None, [os.environ.get("PYTHONPATH")])])
    run_python("-c", program, PYTHONPATH=path)


def test_unknown_bound_is_measured_and_refused_in_a_graph():
    q, k, v, bias = leaves()
    known = select_key_intervals(bias, 50)
    unknown = KeyIntervals(known.intervals, known.query_length)
    out = flash_dmattn_func(q, k, v, attn_bias=bias, key_intervals=unknown)
    expected = flash_dmattn_func(q, k, v, attn_bias=bias, key_intervals=known)
    assert torch.equal(out, expected)
    measured = unknown.measured()
    assert measured.bound is not None and sum(measured.bound) <= 51
    with pytest.raises(RuntimeError, match="bound"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        flash_dmattn_func(q, k, v, attn_bias=bias, key_intervals=unknown)


def test_consecutive_keys_without_bound_equal_listed_keys():
    inputs = leaves(seqlen=700, heads=(4, 2))
    window = sliding_window(700, 200, device="cuda")
    listed = KeyIntervals(window.intervals, 700, window.bound)
    unbound = KeyIntervals(window.intervals, 700, consecutive=True)

    def step(shown=unbound):
        return gradients(lambda *t: attend(*t, key_intervals=shown), inputs)

    graph, captured = capture(step)
    graph.replay()
    assert_close(captured, step(listed))


def test_side_streams_give_same_bits():
    inputs = leaves(seqlen=2000)
    expected = gradients(FUNCTIONS["per_query"], inputs)
    actual = gradients_behind_other_work(inputs, torch.cuda.Stream())
    assert_close(actual, expected)


def test_tensors_on_different_devices_are_named():
    q, k, v, bias = (t.detach() for t in leaves())
    with pytest.raises(TypeError, match="attn_bias: got a tensor on cpu"):
        flash_dmattn_func(q, k, v, attn_bias=bias.cpu())
    with pytest.raises(TypeError, match="key: got .* on cpu"):
        flash_dmattn_func(q, k.cpu(), v)
    with pytest.raises(TypeError, match="key_intervals: got a tensor on cpu"):
        flash_dmattn_func(q, k, v, key_intervals=sliding_window(300, 9))
    options = ([], True, 0, 0.25, 0.0, True, False, "")
    with pytest.raises((ValueError, RuntimeError), match="mask: got cpu, expected the device of q"):
        ops.forward(q, k, v, torch.ones(1, 1, 1, 300).bool(), None, None, *options)


@pytest.mark.parametrize("name", [*FUNCTIONS, "varlen_per_query"])
def test_attention_compiles_without_graph_breaks(name):
    torch._dynamo.reset()
    inputs, function = leaves(), FUNCTIONS.get(name)
    if name in PACKED:
        offsets = torch.tensor(OFFSETS[0], dtype=torch.int32, device="cuda")
        inputs, function = leaves(batch=1), lambda *t: PACKED[name](*t, offsets)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_close(gradients(compiled, inputs), gradients(function, inputs))


@pytest.mark.parametrize("bound", [[], [50, 1]])
def test_operators_pass_opcheck(bound):
    q, k, v, bias = leaves()
    intervals = select_key_intervals(bias, 50).intervals
    options = (bound, True, 0, 0.125, 0.0, True, True, "")  # deterministic: results are compared
    bias_4d = bias[:, :, None].detach().requires_grad_()
    arguments = (q, k, v, None, bias_4d, intervals)
    torch.library.opcheck(ops.forward.default, (*arguments, *options))
    detached = [t if t is None else t.detach() for t in arguments]
    results = ops.forward(*detached, *options)
    dout = torch.randn_like(results[0])
    needs = (True, True, True, True)
    torch.library.opcheck(
        ops.backward.default,
        (dout, *detached, *results, torch.randn_like(results[1][0]), *options, *needs),
    )
    torch.library.opcheck(
        ops.select_key_intervals.default, (bias.detach(), None, [50], "per_query", True, 300)
    )


def test_check_mode_names_the_element(check_mode):
    q, k, v, bias = (t.detach() for t in leaves())
    attend(q, k, v, bias, keep_window_size=50)
    k[1, 7, 1, 3] = torch.nan
    k[1, 200, 0, 0] = torch.inf
    with pytest.raises(RuntimeError, match=r"forward input k\[1, 7, 1, 3\] is nan"):
        attend(q, k, v, bias)
    k[1, 7, 1, 3], k[1, 200, 0, 0] = 0, 0
    q.requires_grad_()
    out = attend(q, k, v, bias)
    dout = torch.zeros_like(out)
    dout[1, 2, 3, 4] = -torch.inf
    with pytest.raises(RuntimeError, match=r"backward input dout\[1, 2, 3, 4\] is -inf"):
        out.backward(dout)
    out = attend(q.detach() * 0, k, v.requires_grad_(), bias.zero_(), nonfinite="propagate")
    with pytest.raises(RuntimeError, match=r"backward output dv\[0, 0, 0, 0\] is inf"):
        out.backward(torch.full_like(out, 0.9 * torch.finfo(out.dtype).max))
