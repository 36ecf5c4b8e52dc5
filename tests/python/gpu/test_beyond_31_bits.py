"""Tensors of more than 2^31 elements: every address on the GPU is formed in 64 bits."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func, sliding_window
from flash_dmattn.check.compare import TENSORS
from flash_dmattn.check.oracle import Problem, attention
from problem_calls import assert_close

LIMIT = 2**31


def memory_of_gpu():
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0


pytestmark = [
    pytest.mark.skipif(memory_of_gpu() < 90e9, reason="needs 90 GB of GPU memory"),
]


@pytest.fixture(autouse=True)
def all_memory():
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def normal(*shape):
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("way", ["intervals", "selection"])
def test_rows_beyond_31_bits_match_oracle(way):
    """q, k, v, out, their gradients and the fp32 sums have more than 2^31 elements. The oracle computes only the last rows."""
    length, heads, head_dim, window = 2**20 + 77, 17, 128, 64
    q, k, v = (normal(1, length, heads, head_dim).requires_grad_() for _ in range(3))
    bias = normal(1, heads, length).requires_grad_()
    dout = normal(1, length, heads, head_dim)
    assert q.numel() > LIMIT
    if way == "intervals":
        options = {"key_intervals": sliding_window(length, window, device="cuda")}
    else:  # equal scores select the most recent keys, the same window but by lists
        equal = torch.zeros(1, heads, length, device="cuda")
        options = {"keep_window_size": window, "selection_scores": equal}
    out, lse = flash_dmattn_func(
        q, k, v, attn_bias=bias, is_causal=True, return_lse=True, **options
    )
    out.backward(dout)
    results = (out, lse.mT, q.grad, k.grad, v.grad, bias.grad.mT)

    rows = 1024
    q, k, v, dout = (t[:, -rows:].contiguous() for t in (q, k, v, dout))
    problem = Problem(q, k, v, dout, bias=bias[:, :, None, -rows:], causal=True)
    problem.shown = sliding_window(rows, window, device="cuda").to_mask()
    for name, actual, wanted, yardstick in zip(
        TENSORS, results, _by_rows(attention(problem)), _by_rows(attention(problem, q.dtype)),
        strict=True,
    ):  # fmt: skip
        half = slice(rows // 2, None)  # the windows of this half lie within the rows
        assert_close(name, actual[:, -rows // 2 :], wanted[:, half], yardstick[:, half])


def _by_rows(result):
    return (
        result.out, result.lse.mT, result.dq, result.dk, result.dv, result.dbias[:, :, 0].mT
    )  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [8192, 8191])
def test_elements_beyond_31_bits_match_oracle(length, batch):
    """A mask, a bias and its gradient have more than 2^31 elements.
    A batch that shares the bias adds to fp32 sums of the same size."""
    heads = 33
    q, k, v = (normal(batch, length, heads, 64).requires_grad_() for _ in range(3))
    dout = normal(batch, length, heads, 64)
    bias = normal(1, heads, length, length).requires_grad_()
    mask = torch.empty(1, heads, length, length, dtype=torch.bool, device="cuda").bernoulli_(0.7)
    assert bias.numel() > LIMIT

    def attend(q, k, v, bias, mask, dout):
        out = flash_dmattn_func(q, k, v, attn_mask=mask, attn_bias=bias, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v, bias), dout)]

    everything = attend(q, k, v, bias, mask, dout)
    last = [t.detach()[:, :, -1:].clone().requires_grad_() for t in (q, k, v)]
    last_bias = bias.detach()[:, -1:].clone().requires_grad_()
    alone = attend(*last, last_bias, mask[:, -1:].clone(), dout[:, :, -1:].clone())
    for name, actual, wanted in zip(("out", "dq", "dk", "dv"), everything, alone, strict=False):
        torch.testing.assert_close(
            actual[:, :, -1:], wanted, rtol=2e-2, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
    torch.testing.assert_close(everything[4][:, -1:], alone[4], rtol=2e-2, atol=2e-4)


def apart(tensor, dim, step):
    """Returns the same values with a stride of `step` elements along `dim`, and NaN in between."""
    shape = tensor.shape
    inner = tensor.numel() // shape[dim]
    memory = torch.full(
        ((shape[dim] - 1) * step + inner,), torch.nan, dtype=tensor.dtype, device="cuda"
    )
    rest = [n for d, n in enumerate(shape) if d != dim]
    strides = [rest[1] * rest[2], rest[2], 1]
    strides.insert(dim, step)
    return memory.as_strided(shape, strides).copy_(tensor.detach()).requires_grad_()


@pytest.mark.parametrize(
    "length, dim, step",
    [
        pytest.param(300, 0, LIMIT + 16, id="batch"),
        pytest.param(300, 2, 2**30 + 8, id="heads"),
        pytest.param(600, 1, 2**22 + 8, id="rows"),
        pytest.param(3, 1, 2**30 + 8, id="rows whose stride in bytes is past 2^31"),
    ],
)
@pytest.mark.parametrize("window", [None, 2])
def test_strides_beyond_31_bits_match_oracle(length, dim, step, window):
    tensors = [normal(2, length, h, 64).requires_grad_() for h in (4, 4, 4, 4)]
    bias = normal(2, 4, length).requires_grad_()
    results = []
    for change in (lambda t: t, lambda t: apart(t, dim, step)):
        q, k, v, dout = (change(t) for t in tensors)
        out = flash_dmattn_func(
            q, k, v, attn_bias=bias, is_causal=True, keep_window_size=window, deterministic=True
        )
        leaves = (q, k, v, bias)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout.detach())])
    for plain, changed in zip(*results, strict=True):
        assert plain.isfinite().all() and torch.equal(plain, changed)
