"""The Triton backend works in PyTorch with strides, empty tensors, autocast, checkpoints, streams and graphs."""

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from flash_dmattn._core import ops as _ops

triton = pytest.importorskip("triton")

from flash_dmattn import triton_dmattn_func  # noqa: E402
from flash_dmattn._backends.triton import launch  # noqa: E402
from gpu import capture  # noqa: E402

# In the interpreter, numpy warns about inf and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has neither")
LENGTH, LENGTH_K, WINDOW = 37, 45, 11


def leaves(dtype=torch.float32, seqlen_q=LENGTH, seqlen_k=LENGTH_K, batch=1, heads=(4, 2)):
    heads_q, heads_kv = heads
    shapes = [(batch, seqlen_q, heads_q, 16), *[(batch, seqlen_k, heads_kv, 16)] * 2]
    shapes.append((batch, heads_kv, seqlen_k))
    return [torch.randn(shape).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def attention(q, k, v, bias, **options):
    return triton_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, **options)


def results(tensors, function=attention, dout=None, **options):
    """Returns out, and the gradients of the tensors that require one."""
    out = function(*tensors, **options)
    dout = torch.ones_like(out) if dout is None else dout
    return [out, *torch.autograd.grad(out, [t for t in tensors if t.requires_grad], dout)]


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def odd_strides(tensor):
    """Copies a tensor to every second element, in every dimension, of memory filled with NaN."""
    memory = tensor.new_full([2 * size + 1 for size in tensor.shape], torch.nan)
    return memory[tuple(slice(1, 2 * size + 1, 2) for size in tensor.shape)].copy_(tensor.detach())


def reversed_strides(tensor):
    order = list(reversed(range(tensor.dim())))
    return tensor.detach().permute(order).contiguous().permute(order)


@pytest.mark.parametrize("lay_out, window", [(odd_strides, None), (reversed_strides, WINDOW)])
def test_strided_inputs_equal_contiguous(lay_out, window):
    tensors = leaves()
    dout = torch.randn_like(tensors[0]).detach()
    laid_out = [lay_out(t).requires_grad_() for t in tensors]
    strided_results = results(laid_out, dout=lay_out(dout), keep_window_size=window)
    assert_same(strided_results, results(tensors, dout=dout, keep_window_size=window))


def test_broadcast_inputs_equal_expanded():
    """The inputs have stride 0 in every dimension except the last, and the gradient has one element."""
    wide = leaves()
    tensors = [t[:1, :1, :1].expand(t.shape).detach().requires_grad_() for t in wide]
    dout = torch.ones((), device=DEVICE).expand(wide[0].shape)
    dense = [t.detach().contiguous().requires_grad_() for t in tensors]
    assert_same(results(tensors, dout=dout), results(dense, dout=dout.contiguous()))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    "size",
    [{"seqlen_q": 0}, {"seqlen_k": 0}, {"seqlen_q": 0, "seqlen_k": 0}, {"batch": 0}, {"heads": (0, 2)}, {"heads": (0, 0)}],
    ids=str,
)  # fmt: skip
def test_empty_tensors_have_empty_or_zero_gradients(size, window):
    tensors = leaves(**size)
    out, *gradients = results(tensors, keep_window_size=window)
    assert out.shape == tensors[0].shape and not out.any()
    for tensor, gradient in zip(tensors, gradients, strict=True):
        assert gradient.shape == tensor.shape and not gradient.any()


def test_subset_of_gradients_equals_all():
    """One of them alone, and all but one."""
    tensors = leaves(seqlen_q=5, seqlen_k=9)
    out, *gradients = results(tensors)
    for wanted in itertools.product([False, True], repeat=4):
        if sum(wanted) % 2:
            some = [t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
            assert_same(results(some), [out, *itertools.compress(gradients, wanted)])


def test_row_with_one_key_has_no_gradient():
    """The gradient is 0 in fp32, because dout . out is summed in the same order as dout . v."""
    tensors = leaves(seqlen_k=1)
    _, dq, dk, _, dbias = results(tensors, dout=torch.randn_like(tensors[0]))
    for gradient in (dq, dk, dbias):
        assert not gradient.any() if DEVICE == "cuda" else gradient.abs().max() < 1e-5


def test_checkpointing_gives_same_gradients():
    def sparse(*tensors):
        return attention(*tensors, keep_window_size=WINDOW)

    tensors = leaves()
    expected = results(tensors, sparse)
    out = checkpoint(sparse, *tensors, use_reentrant=False)
    out.backward(torch.ones_like(out))
    assert_same([out, *[t.grad for t in tensors]], expected)


def test_triton_calls_compile_without_graph_breaks():
    def all_and_chosen_keys(*tensors):
        return attention(*tensors) + attention(*tensors, keep_window_size=WINDOW)

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(all_and_chosen_keys, backend=backend, fullgraph=True)
    for lengths in ((5, 13), (7, 16)):  # the second ones are dynamic
        tensors = leaves(seqlen_q=lengths[0], seqlen_k=lengths[1])
        assert_same(results(tensors, compiled), results(tensors, all_and_chosen_keys))


@needs_gpu
def test_side_stream_gives_same_result():
    tensors = leaves(torch.bfloat16, 2000, 2000)
    expected = results(tensors, keep_window_size=200)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        slow = torch.randn(8192, 8192, device=DEVICE)
        for _ in range(20):
            slow = slow @ slow * 1e-4
        zero = slow[0, 0].nan_to_num(0, 0, 0) * 0
        later = [(t.detach() + zero.to(t.dtype)).requires_grad_() for t in tensors]
        stream_results = results(later, keep_window_size=200)
    torch.cuda.synchronize()
    assert_same(stream_results, expected)


@needs_gpu
@pytest.mark.parametrize("hidden", [False, True])
def test_graph_replay_gives_same_result(hidden, monkeypatch):
    if hidden:
        monkeypatch.setattr(_ops, "has_kernels_for", lambda tensor: False)
    tensors = leaves(torch.bfloat16)
    graph, captured_results = capture(lambda: results(tensors, keep_window_size=WINDOW))
    with torch.no_grad():
        for tensor in tensors:
            tensor.normal_()
    graph.replay()
    assert_same(captured_results, results(tensors, keep_window_size=WINDOW))


@needs_gpu
def test_offsets_beyond_31_bits_match_oracle():
    wide = torch.randn(1, 70000, 4, 80 * 128, device=DEVICE, dtype=torch.bfloat16)[..., :64]
    q, k, v = wide[:, -130:], wide[:, -130:, :2], wide[:, -130:, 2:]
    bias = torch.zeros(1, 2, 130, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    views = [t.detach().requires_grad_() for t in (q, k, v)]
    dense = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
    assert_same(results([*views, bias]), results([*dense, bias]))


@needs_gpu
def test_second_device_gives_same_result():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    tensors = leaves(torch.bfloat16)
    there = [t.detach().to("cuda:1").requires_grad_() for t in tensors]
    second_results = results(there, keep_window_size=WINDOW)
    assert_same([t.to(DEVICE) for t in second_results], results(tensors, keep_window_size=WINDOW))


@pytest.mark.parametrize(
    "set_flag",
    [
        lambda on: setattr(torch.backends.cuda.matmul, "allow_tf32", on),
        lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
        lambda on: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32" if on else "ieee"),
    ],
)
def test_each_flag_of_torch_permits_tf32_products_of_float32_alone(set_flag, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    with FakeTensorMode():
        tensors = [torch.empty(1, dtype=t, device="cuda") for t in (torch.float32, torch.float16)]
    try:
        set_flag(True)
        assert [launch.product_precision(t).value for t in tensors] == ["tf32", "ieee"]
    finally:
        set_flag(False)
    assert launch.product_precision(tensors[0]).value == "ieee"
