"""The Triton kernels never read memory outside their inputs or before it is written, and numbers at the end of a dtype stay finite."""

import pytest
import torch
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode

from flash_dmattn._core import ops as _ops
from largest_tensor import LargestTensor

triton = pytest.importorskip("triton")

from flash_dmattn import select_key_intervals, sliding_window, triton_dmattn_func  # noqa: E402
from flash_dmattn._backends.triton import launch  # noqa: E402

# In the interpreter, numpy warns about inf and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
WAYS = {
    "dense": {"is_causal": True},
    "intervals": {"is_causal": True, "keep_window_size": 9},
    "not causal": {},
}
# The interpreter takes twice as long for two heads.
KEY_HEADS = {"dense": 1, "intervals": 2, "not causal": 1}


def leaves(dtype, seqlen_q=37, seqlen_k=45, head_dim=20, bias=None, key_heads=1):
    key = (1, seqlen_k, key_heads, head_dim)
    bias = bias or (1, key_heads, seqlen_k)
    shapes = [(1, seqlen_q, 2 * key_heads, head_dim), key, key, bias]
    return [torch.randn(shape).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def attend(tensors, dout=None, **options):
    """Returns out, dq, dk, dv and dbias."""
    out = triton_dmattn_func(*tensors[:3], attn_bias=tensors[3], **options)
    dout = torch.ones_like(out) if dout is None else dout
    return [out, *torch.autograd.grad(out, tensors, dout)]


def assert_equal(results, expected):
    for name, a, b in zip(("out", "dq", "dk", "dv", "dbias"), results, expected, strict=True):
        assert a.isfinite().all() and torch.equal(a, b), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_unwritten_or_past_the_end_is_read(dtype, way, monkeypatch):
    """Results are the same where the inputs lie inside memory filled with NaN, and torch fills all memory from the allocator with NaN."""

    def inside(tensor):
        memory = torch.full([s + 9 for s in tensor.shape], torch.nan, dtype=dtype, device=DEVICE)
        view = memory[tuple(slice(3, 3 + size) for size in tensor.shape)]
        return view.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)

    flags = []

    def watched(*arguments, find=launch.range_flags):
        flags.append(find(*arguments))
        return flags[-1]

    monkeypatch.setattr(launch, "range_flags", watched)
    tensors = leaves(dtype, key_heads=KEY_HEADS[way])
    dout = torch.randn_like(tensors[0]).detach()
    assert deterministic.fill_uninitialized_memory  # by the fixture of conftest.py
    surrounded = attend([inside(t) for t in tensors], inside(dout), **WAYS[way])
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", False)
    assert_equal(surrounded, attend(tensors, dout, **WAYS[way]))
    assert flags and not torch.stack(flags).any()  # the fp64 kernels would forgive such a read


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9])
def test_inputs_at_dtype_limit_give_finite_gradients(dtype, window):
    tensors = leaves(dtype)
    edge = torch.finfo(dtype).max
    with torch.no_grad():
        for t in tensors[:3]:
            t.copy_(torch.where(torch.rand(t.shape, device=DEVICE) < 0.5, edge, -edge))
    dout = torch.full_like(tensors[0], edge).detach()
    for result in attend(tensors, dout, is_causal=True, keep_window_size=window):
        assert result.isfinite().all()


def test_two_runs_of_triton_are_bit_identical():
    tensors = leaves(torch.float16)
    runs = [attend(tensors, is_causal=True, keep_window_size=9) for _ in range(2)]
    assert_equal(*runs)


def launched(tensors, dout, key_intervals=None, key_bound=()):
    """Returns the gradients of a causal call without torch's operators, because a dispatch mode cannot look inside an operator."""
    q, k, v, bias = (t.detach() for t in tensors)
    bias = bias[:, :, None] if bias.dim() == 3 else bias
    arguments = (None, bias, key_intervals, list(key_bound), True, 0.25, 0.0)
    problem = launch.Problem(q, k, v, *arguments)
    out, *rest = launch.forward(problem, True)
    dlse = torch.randn_like(rest[0])
    return launch.backward(problem, dout, out, *rest, dlse, True, [True] * 4)


GUARD = 4096  # elements on either side
GUARD_VALUE = 77
ALLOCATORS = {
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty,
}  # fmt: skip


class GuardedMemory(TorchDispatchMode):
    """Within the context, uninitialised tensors lie between guards."""

    def __init__(self):
        super().__init__()
        self._memory = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket not in ALLOCATORS:
            return result
        elements = result.untyped_storage().nbytes() // result.element_size()
        memory = torch.full(
            (elements + 2 * GUARD,), GUARD_VALUE, dtype=result.dtype, device=result.device
        )
        self._memory.append(memory)
        return memory.as_strided(result.shape, result.stride(), GUARD)

    def assert_untouched(self):
        assert self._memory
        for memory in self._memory:
            for guard in (memory[:GUARD], memory[-GUARD:]):
                assert (guard == GUARD_VALUE).all(), f"{memory.numel() - 2 * GUARD} {memory.dtype}"


@pytest.mark.parametrize("bias", [(1, 2, 45), (1, 2, 37, 1), (1, 2, 37, 45)], ids=str)
@pytest.mark.parametrize("by_intervals", [False, True])
def test_nothing_past_the_end_is_written(bias, by_intervals):
    tensors = leaves(torch.float16, bias=bias)
    dout = torch.randn_like(tensors[0]).detach()
    shown = sliding_window(45, 9, query_length=37, device=DEVICE).intervals
    with GuardedMemory() as guards:
        gradients = launched(tensors, dout, shown if by_intervals else None)
    guards.assert_untouched()
    for gradient in gradients:
        assert gradient.isfinite().all()


@pytest.mark.parametrize("hidden", [False, True])
def test_selection_needs_no_quadratic_tensor(hidden, monkeypatch):
    """hidden: selection and tile lists are made by torch operators, as on GPUs for which the library has no kernels."""
    if hidden:
        monkeypatch.setattr(_ops, "has_kernels_for", lambda tensor: False)
    length, window = 300, 7
    tensors = leaves(torch.float32, length, length, 16)
    with LargestTensor() as largest:
        chosen = select_key_intervals(tensors[3].detach(), window)
        launched(tensors, tensors[0].detach(), chosen.intervals, chosen.bound)
    assert largest.elements < length * length


def test_wrong_dtypes_and_second_derivatives_are_refused():
    tensors = leaves(torch.float32)
    with pytest.raises(TypeError, match="float64"):
        triton_dmattn_func(*(t.double() for t in tensors[:3]))
    out = triton_dmattn_func(*tensors[:3])
    (dq,) = torch.autograd.grad(out.sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph: got True, expected False"):
        dq.sum().backward()
